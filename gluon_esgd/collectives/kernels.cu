// Vectors on GPUs: combine up to 16 of them element by element, and write the result to several.
//
// CuPy compiles this file with NVRTC, nvcc compiles it, and so does a C++ compiler for the CPU, with
// the threads as a loop: the tests of the index arithmetic need no GPU. Hence no header is included.

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define THREAD ((long long)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((long long)gridDim.x * blockDim.x)
#else
#define DEVICE inline
struct alignas(16) uint4 { unsigned x, y, z, w; };
static long long THREAD, THREADS;
extern "C" long long misaligned;  // how often 16 bytes were asked for where the hardware traps
long long misaligned = 0;
#endif

typedef long long Length;
enum Operation { SUM, MIN, MAX, KEEP };

// By value: kernel parameters lie in constant memory, which all threads read at once.
const int MOST = 16;
struct Vectors { void *at[MOST]; };

struct Divisor {
    int divides;         // 0: leave the result as it is
    double value;        // of a mean
    const void *weight;  // else read here, in the type of the sums; null: there is none
};

// ---- float16: stored as its bits, added up in float32 ----

struct half_t { unsigned short bits; };

#ifdef __CUDACC__
DEVICE float widen(half_t from) {
    float to;
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from.bits));
    return to;
}
DEVICE void narrow(float from, half_t &to) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(from));
}
#else
DEVICE float widen(half_t from) {
    unsigned sign = (from.bits & 0x8000u) << 16, rest = from.bits & 0x7fffu, bits;
    float to, magic = 0.5f;
    if (rest >= 0x7c00u) {
        bits = 0x7f800000u | (rest & 0x3ffu) << 13;
        __builtin_memcpy(&to, &bits, 4);
    } else if (rest >= 0x400u) {
        bits = (rest << 13) + (112u << 23);
        __builtin_memcpy(&to, &bits, 4);
    } else {  // zero and subnormal: a count of 2^-24
        bits = (126u << 23) | rest;
        __builtin_memcpy(&to, &bits, 4);
        to -= magic;
    }
    __builtin_memcpy(&bits, &to, 4);
    bits |= sign;
    __builtin_memcpy(&to, &bits, 4);
    return to;
}
DEVICE void narrow(float from, half_t &to) {
    unsigned bits;
    __builtin_memcpy(&bits, &from, 4);
    unsigned sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu, half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u | (rest >> 13 & 0x3ffu);
    } else if (rest >= 0x477ff000u) {  // rounds to more than 65504
        half = 0x7c00u;
    } else if (rest < 0x38800000u) {  // subnormal: adding 0.5 leaves the count of 2^-24, rounded
        float sum;
        __builtin_memcpy(&sum, &rest, 4);
        sum += 0.5f;
        __builtin_memcpy(&half, &sum, 4);
        half -= 126u << 23;
    } else {
        half = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
    }
    to.bits = (unsigned short)(sign | half);
}
#endif

template <class T> DEVICE T widen(T from) { return from; }
template <class T> DEVICE void narrow(T from, T &to) { to = from; }

// ---- arithmetic, as numpy does it ----

// Signed overflow wraps, which C++ promises for unsigned types only.
template <class T> DEVICE T added(T a, T b) { return a + b; }
DEVICE int added(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
DEVICE Length added(Length a, Length b) {
    return (Length)((unsigned long long)a + (unsigned long long)b);
}

// NaN in either of the two is the result: no comparison with it is true.
template <int OP, class T> DEVICE T combined(T a, T b) {
    if (OP == SUM) return added(a, b);
    if (OP == MIN) return a <= b || a != a ? a : b;
    if (OP == MAX) return a >= b || a != a ? a : b;
    return a;
}

DEVICE float divided(float a, float by) { return by == 0 ? 0 : a / by; }
DEVICE double divided(double a, double by) { return by == 0 ? 0 : a / by; }
template <class T> DEVICE T divided(T a, T by) {  // rounded down
    if (by == 0) return 0;
    if (by == -1) return (T)(0 - (unsigned long long)a);  // the smallest number has no opposite
    T quotient = a / by;
    return quotient - (a % by != 0 && (a < 0) != (by < 0));
}

// ---- memory ----

template <class T> union Pack {  // what one thread loads and stores at once
    uint4 raw;
    T elements[16 / sizeof(T)];
};

template <class T> DEVICE uint4 *pack_at(void *vector, Length head, Length index) {
    uint4 *at = (uint4 *)((T *)vector + head) + index;
#ifndef __CUDACC__
    misaligned += (unsigned long long)at % 16 != 0;
#endif
    return at;
}

DEVICE int offset(const void *pointer) { return (int)((unsigned long long)pointer % 16); }

// Elements before the first that lies at a multiple of 16 bytes, in all vectors; -1: no such one.
template <class T> DEVICE Length head_of(const Vectors &from, int n, const Vectors &to, int m) {
    int first = offset(from.at[0]), apart = 0;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        if (k < n) apart |= offset(from.at[k]) ^ first;
        if (k < m) apart |= offset(to.at[k]) ^ first;
    }
    return apart ? -1 : (16 - first) % 16 / (int)sizeof(T);
}

// ---- the kernel: element i of each of the m results is that of the n vectors, in their order ----

// Loops over vectors are unrolled, so that pointers are read where parameters lie: an index that is
// known only at run time would have them copied to memory of each thread first.
template <class In, class Sum, class Out, int OP> struct Combine {
    const Vectors &from, &to;
    int n, m, divides;
    Sum by;

    DEVICE Sum finished(Sum total) const { return divides ? divided(total, by) : total; }

    DEVICE void one(Length i) const {
        Sum total = widen(((In *)from.at[0])[i]);
#pragma unroll
        for (int k = 1; k < MOST; ++k)
            if (k < n) total = combined<OP>(total, (Sum)widen(((In *)from.at[k])[i]));
        Out result;
        narrow(finished(total), result);
#pragma unroll
        for (int k = 0; k < MOST; ++k)
            if (k < m) ((Out *)to.at[k])[i] = result;
    }

    // Only where In and Out are of one size.
    DEVICE void pack(Length head, Length index) const {
        const int WIDTH = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out)), AHEAD = 4;
        Sum total[WIDTH] = {};
        Pack<In> loaded[AHEAD];
#pragma unroll
        for (int start = 0; start < MOST; start += AHEAD) {
            if (start >= n && start > 0) break;
#pragma unroll
            for (int k = 0; k < AHEAD; ++k)  // all loads before the first use
                if (start + k < n || start + k == 0)
                    loaded[k].raw = *pack_at<In>(from.at[start + k], head, index);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    if (start + k == 0)
                        total[e] = widen(loaded[k].elements[e]);
                    else if (start + k < n)
                        total[e] = combined<OP>(total[e], (Sum)widen(loaded[k].elements[e]));
                }
            }
        }
        Pack<Out> result;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) narrow(finished(total[e]), result.elements[e]);
#pragma unroll
        for (int k = 0; k < MOST; ++k)
            if (k < m) *pack_at<Out>(to.at[k], head, index) = result.raw;
    }

    DEVICE void run(Length length) const {
        Length head = sizeof(In) == sizeof(Out) ? head_of<In>(from, n, to, m) : -1;
        const Length width = 16 / sizeof(In);
        Length packs = head < 0 || head > length ? 0 : (length - head) / width;
        if (packs == 0) head = length;
        for (Length i = THREAD; i < packs; i += THREADS) pack(head, i);
        // What lies before and behind the packs.
        for (Length i = THREAD; i < length - packs * width; i += THREADS)
            one(i < head ? i : i + packs * width);
    }
};

template <class In, class Sum, class Out, int OP>
DEVICE void combine(
    const Vectors &from, int n, const Vectors &to, int m, Length length, const Divisor &divisor) {
    Sum by = (Sum)1;
    if (divisor.divides) by = divisor.weight ? *(const Sum *)divisor.weight : (Sum)divisor.value;
    Combine<In, Sum, Out, OP> work = {from, to, n, m, divisor.divides, by};
    work.run(length);
}

#ifdef __CUDACC__
#define KERNEL(name, In, Sum, Out, OP)                                                            \
    extern "C" __global__ void __launch_bounds__(256) name(                                      \
        Vectors from, int n, Vectors to, int m, Length length, Divisor divisor) {                 \
        combine<In, Sum, Out, OP>(from, n, to, m, length, divisor);                               \
    }
#else
#define KERNEL(name, In, Sum, Out, OP)                                                            \
    extern "C" void name(int grid, int block, const Vectors *from, int n, const Vectors *to,      \
        int m, Length length, const Divisor *divisor) {                                           \
        THREADS = (Length)grid * block;                                                           \
        for (THREAD = 0; THREAD < THREADS; ++THREAD)                                              \
            combine<In, Sum, Out, OP>(*from, n, *to, m, length, *divisor);                        \
    }
#endif

#define KERNELS(name, In, Sum)                                                                    \
    KERNEL(name##_sum, In, Sum, In, SUM)                                                          \
    KERNEL(name##_min, In, Sum, In, MIN)                                                          \
    KERNEL(name##_max, In, Sum, In, MAX)

KERNELS(float16, half_t, float)
KERNELS(float32, float, float)
KERNELS(float64, double, double)
KERNELS(int32, int, int)
KERNELS(int64, Length, Length)

// From and to the type of the sums, for results that are not ready yet.
KERNEL(float16_to_float32_sum, half_t, float, float, SUM)
KERNEL(float16_to_float32_min, half_t, float, float, MIN)
KERNEL(float16_to_float32_max, half_t, float, float, MAX)
KERNEL(float32_to_float16_sum, float, float, half_t, SUM)

// One vector to several, bit by bit.
KERNEL(keep_2, short, short, short, KEEP)
KERNEL(keep_4, int, int, int, KEEP)
KERNEL(keep_8, Length, Length, Length, KEEP)
