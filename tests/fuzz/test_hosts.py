"""Host files and host lists."""

from __future__ import annotations

from gluon_esgd.launch.hosts import parse_hosts, read_hostfile

from .mutation import Cases, bytes_, seeds, texts

FILE = b"# machines\nalpha slots=4\nbeta:2   # the old one\n\n  gamma\n10.0.0.7 slots=16\n"


def test_any_list_of_hosts_is_read_or_refused():
    cases = Cases()
    for seed, random in seeds(0, 300):
        text = texts(random, "alpha:4,beta:2,gamma,10.0.0.7:16")
        cases.ends_well(seed, text, lambda t=text: _well_formed(parse_hosts(t)))
    assert cases.count == 300 and cases.refused > 50


def test_any_host_file_is_read_or_refused_by_its_name(tmp_path):
    cases, path = Cases(), tmp_path / "machines"
    for seed, random in seeds(1000, 300):
        data = bytes_(random, FILE, texts(random, "alpha:4").encode(errors="replace"))
        path.write_bytes(data)
        cases.ends_well(seed, data, lambda: _well_formed(read_hostfile(str(path))), [str(path)])
    for seed, place in enumerate((tmp_path, tmp_path / "none", tmp_path / ("x" * 300), "a\0b")):
        cases.ends_well(seed, place, lambda p=place: read_hostfile(str(p)), [repr(str(place))])
    assert cases.count == 304 and cases.refused > 50


def _well_formed(hosts):
    assert hosts and all(host.name and 0 <= host.slots <= 1 << 20 for host in hosts)
    assert all(host.name.isprintable() and " " not in host.name for host in hosts)
