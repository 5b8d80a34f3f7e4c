"""Settings from environments that nobody should have made."""

from __future__ import annotations

from gluon_esgd import settings
from gluon_esgd.settings import PREFIX

from .mutation import Cases, seeds, texts

GOOD = {
    "JOB_DIR": "/tmp/job",
    "CLIENT": "1",
    "NUM_CLIENTS": "4",
    "NUM_SERVERS": "2",
    "SCHEDULER": "127.0.0.1:9000",
    "PLACES": "0/4;1/4",
    "RULE": "esgd",
    "ALPHA": "0.25",
    "NODES": "3,1",
    "COMPRESSION": "fp16",
    "STALL_ABORT_S": "off",
    "CENTER_WAIT_S": "2.5",
    "CENTER_LIMIT_S": "60",
    "GRACE_S": "0",
    "BUCKET_BYTES": "8388608",
    "WAIT": "spin",
    "INTERVAL": "16",
}


def test_any_environment_is_read_or_refused_by_the_name_of_the_variable():
    cases = Cases()
    for seed, random in seeds(0, 500):
        environ = {PREFIX + name: text for name, text in GOOD.items()}
        changed = random.sample(sorted(environ), random.choice((1, 1, 3)))
        for name in changed:
            environ[name] = texts(random, environ[name])
        if random.randrange(5) == 0:
            extra = PREFIX + texts(random, "JOB_DIR")
            environ[extra] = "1"
            changed.append(extra)
        cases.ends_well(seed, environ, lambda e=environ: _use(settings.read(e)), changed)
    assert cases.count == 500 and cases.refused > 200


def _use(found: settings.Settings) -> None:
    """What was read can be handed on, and read again; no wait is without an end."""
    waits = [value for name, value in vars(found).items() if name.endswith("_s")]
    assert all(wait is None or 0 <= wait <= settings.MOST_SECONDS for wait in waits)
    assert settings.read(found.environment()) == found
