"""The plugin in a session of its own: strict skips, --require, --repeat, seeds, lost contexts, the
summary."""

from __future__ import annotations

import pytest

from megamoe.capability import probe

CONFTEST = 'pytest_plugins = ["megamoe.suite.pytest_plugin"]'


@pytest.fixture(scope="module", autouse=True)
def native_modules_stay():
    """pytester forgets every module that was first imported in a session inside this one, and triton's
    library ends the process when it is loaded a second time: here it is loaded before."""
    probe("triton")


@pytest.fixture
def session(pytester, monkeypatch):
    """Runs a test file with the plugin; ``own_process`` where it changes torch or starts workers."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(CONFTEST)

    def run(source, *options, own_process=False):
        pytester.makepyfile(test_it=source)
        runner = pytester.runpytest_subprocess if own_process else pytester.runpytest_inprocess
        return runner("-p", "no:cacheprovider", *options)

    return run


def test_skip_without_a_known_reason_fails(session):
    done = session("import pytest\ndef test_a():\n    pytest.skip('flaky')\n", "--device=cpu")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*skipped for 'flaky', which is none of: needs capability*"])


def test_requires_skips_with_a_reason(session):
    done = session("import pytest\n@pytest.mark.requires('sm70')\ndef test_a():\n    pass\n", "--device=cpu")
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["*not run*", "1 tests: needs capability: sm70*"])


def test_require_makes_it_a_failure(session):
    source = "import pytest\n@pytest.mark.requires('sm70')\ndef test_a():\n    pass\n"
    session(source, "--device=cpu", "--require=sm70").assert_outcomes(errors=1)
    session(source, "--device=cpu", "--require=sm100").assert_outcomes(skipped=1)
    assert session(source, "--require=nothing").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.requires("triton")
def test_native_modules_can_be_used_after_a_session(session):
    session("def test_a():\n    import triton\n", "--device=cpu").assert_outcomes(passed=1)
    import triton.language

    assert triton.language.float32


def test_header(session):
    done = session("def test_a(device):\n    assert device == 'cpu'\n", "--device=cpu")
    done.stdout.fnmatch_lines(
        ["megamoe: python *torch *", "devices: cpu: *", "runs on: cpu, tier default; capabilities: *"]
    )
    done.assert_outcomes(passed=1)


def test_seeds_come_from_the_test(session):
    source = """
        import random, numpy, torch, pytest

        seen = {}

        @pytest.mark.parametrize("n", [0, 1])
        def test_a(n):
            seen[n] = (random.random(), numpy.random.rand(), torch.rand(1).item())

        def test_b():
            assert seen[0] != seen[1]
            print("drawn", *seen[0])
    """
    first, second = (session(source, "-s", "--device=cpu") for _ in range(2))
    drawn = [[line for line in done.outlines if "drawn" in line] for done in (first, second)]
    assert drawn[0] == drawn[1] != []


LOSING = """
    import pytest, torch

    def test_before():
        pass

    def test_culprit():
        # what a sticky error looks like from outside: the device says so from now on, in this process
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access"))

    def test_innocent():
        assert not torch.cuda.is_initialized()

    def test_guilty_itself():
        assert 1 == 2

    @pytest.mark.requires("sm70")
    def test_skipped():
        pass
"""


def test_a_lost_context_is_the_fault_of_one_test(session):
    done = session(LOSING, "--device=cpu", "-v", own_process=True)
    done.assert_outcomes(passed=2, failed=2, skipped=1)
    done.stdout.fnmatch_lines(
        [
            "*test_before PASSED*",
            "*test_culprit FAILED*",
            "*test_innocent PASSED*",
            "*test_guilty_itself FAILED*",
            "*the CUDA context is lost: an illegal memory access*",
            "*in a process of its own, after *test_culprit*",
        ]
    )


def test_results_are_summed_up(session):
    source = """
        from megamoe.suite.pytest_plugin import note_result

        def test_a(request):
            note_result(request, op="op", implementation="mine", device="cpu", compared=1000)

        def test_b(request):
            note_result(request, op="op", implementation="mine", device="cpu", compared=234)
            assert False
    """
    done = session(source, "--device=cpu")
    done.stdout.fnmatch_lines(["*compared byte for byte*", "op mine cpu: 2 cases, 1,234 bytes, 1 FAILED"])
    done = session(source, "--device=cpu", "-n", "2", own_process=True)
    done.stdout.fnmatch_lines(["op mine cpu: 2 cases, 1,234 bytes, 1 FAILED"])
