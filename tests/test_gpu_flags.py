"""XLA flags of GPU runs. Run: .venv/bin/python -m pytest tests/test_gpu_flags.py"""

from mimo_jax import gpu_flags


def test_flags_are_added_to_those_of_the_user_and_never_against_them():
    environ = {"XLA_FLAGS": "--xla_dump_to=/x --xla_gpu_enable_command_buffer="}
    gpu_flags.set_gpu_flags(environ)
    assert environ["XLA_FLAGS"] == (
        "--xla_dump_to=/x --xla_gpu_enable_command_buffer= "
        "--xla_gpu_experimental_force_split_k=1 --xla_gpu_all_reduce_combine_threshold_bytes=0"
    )
    empty: dict[str, str] = {}
    gpu_flags.set_gpu_flags(empty)
    assert empty["XLA_FLAGS"].split() == list(gpu_flags.GPU_XLA_FLAGS)


def test_only_known_versions_with_a_plugin_get_them(monkeypatch):
    found = {"jax_plugins": object(), "jax_plugins.xla_cuda13": object()}
    monkeypatch.setattr(gpu_flags.importlib.util, "find_spec", found.get)
    for jax_version, expected in (("0.12.0.1", True), ("0.11.2", False), ("1.0", True)):
        monkeypatch.setattr(gpu_flags, "version", lambda name, v=jax_version: v)
        assert gpu_flags.has_gpu_plugin() is expected
    found.pop("jax_plugins.xla_cuda13")
    assert not gpu_flags.has_gpu_plugin()
