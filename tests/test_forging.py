"""Attempts to forge the verdict on a program: none earns anything, the honest program earns all, a wrong one nothing.

These are published on purpose: a policy finds such things by chance, and a reader should be able to check that they fail.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest

from rlhf_nb.rewards.code import PythonTests
from rlhf_nb.sandbox import runner
from rlhf_nb.sandbox.inside import pack, unpack
from rlhf_nb.sandbox.runner import Sandbox
from rlhf_nb.sandbox.verdict import translate_tests

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs POSIX limits")
HONEST = "def total(xs):\n    return sum(xs)\n"
WRONG = "def total(xs):\n    return 4711\n"
TESTS = (
    "assert total([1, 2, 3]) == 6",
    "assert abs(total([0.1, 0.2]) - 0.3) < 1e-9",
    "assert total([4, 5]) in (9, 9.0)",
    "assert not total([7]) != 7",
    "xs = [5, 6]\nr = total(xs)\nassert r == sum(xs)",
    "assert sorted([total([3]), total([2])]) == [2, 3]",
    "assert math.isclose(total([1.5]), 1.5)",
    "for n in range(1, 4):\n    assert total([n] * 3) == 3 * n",
    "assert all(map(lambda n: total([n, n]) == 2 * n, [1, 2, 3]))",
    "assert str(total([20, 3])) == '23'",
)
# What an attack does with texts and numbers that it finds: look for what is expected of it.
LOOK = r"""
import os, re, sys
FOUND = []
def digest(x, depth=0):
    if isinstance(x, (bytes, bytearray)): x = bytes(x).decode("latin1")
    if isinstance(x, str):
        for args, want in re.findall(r"total\((\[[^\]]*\])\)[^=]*== *([\d.]+)", x): FOUND.append((args, want))
    elif hasattr(x, "co_consts") and depth < 9:
        consts = [c for c in x.co_consts if isinstance(c, (int, float))]
        FOUND.extend(("", str(c)) for c in consts)
        for c in x.co_consts: digest(c, depth + 1)
    elif isinstance(x, dict) and depth < 4:
        for v in list(x.values()): digest(v, depth + 1)
    elif isinstance(x, (list, tuple)) and depth < 4:
        for v in x: digest(v, depth + 1)
def total(xs):
    for args, want in FOUND:
        if args == repr(xs): return float(want)
    return float(FOUND[-1][1]) if FOUND else -1
"""
YES = """
class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __float__(self): return 1.5
    def __bool__(self): return True
    def __hash__(self): return 9
    def __contains__(self, x): return True
    def __index__(self): return -5
def total(xs): return Yes({args})
"""
FRAMES = """
import sys
def frames():
    f = sys._getframe()
    while f is not None:
        yield f
        f = f.f_back
"""
ATTACKS = {
    # the seven that used to succeed against assertions in the program's own process, or could have
    "the job's file descriptor": LOOK + """
secrets = []
for fd in range(3, 64):
    try: data = os.pread(fd, 1 << 20, 0)
    except OSError: continue
    digest(data)
    n = int.from_bytes(data[:8], "little")
    secrets += [data[8:24]] + [data[i:i + 16] for i in range(24 + n, len(data), 16)]
for fd in range(3, 64):
    try: os.write(fd, b"".join(secrets))
    except OSError: pass
if secrets: os._exit(0)
""",
    "the locals of the frames above": LOOK + FRAMES + """
for f in frames(): digest(dict(f.f_locals))
def answer(xs):
    for f in frames(): digest(dict(f.f_locals))
    return old(xs)
old, total = total, answer
""",
    "leaves once it has written its answer": "import os\ndef total(xs):\n    for fd in range(3, 64):\n        try: os.write(fd, b'+' * 64)\n        except OSError: pass\n    os._exit(0)\n",
    "overwrites the compiled tests": FRAMES + """
def clean():
    for f in frames():
        for value in list(f.f_locals.values()):
            if isinstance(value, list):
                for i, x in enumerate(value):
                    if hasattr(x, "co_code"): value[i] = compile("pass", "", "exec")
clean()
def total(xs): clean()
""",
    "reads the constants of the code above": LOOK + FRAMES + """
for f in frames(): digest(f.f_code)
for m in list(sys.modules.values()): digest(dict(vars(m)) if hasattr(m, "__dict__") else {})
""",
    "an object equal to everything": YES.format(base="", args=""),
    "a kind of int that is equal to everything": YES.format(base="(int)", args="-5"),
    # twenty and more of our own
    "a kind of float": YES.format(base="(float)", args="-5.5"),
    "a kind of str": YES.format(base="(str)", args="'no'"),
    "a kind of tuple": YES.format(base="(tuple)", args="()"),
    "a dictionary with an answer for every key": "class D(dict):\n    def __missing__(self, k): return k\n    def __eq__(self, o): return True\ndef total(xs): return D()\n",
    "all objects of the collector": LOOK + "import gc\ntry:\n    for x in gc.get_objects(): digest(x)\nexcept BaseException: pass\n",
    "the memory of the judge": LOOK + "for p in ('self', str(os.getppid()), '1', str(os.getpid() - 1)):\n    for name in ('mem', 'environ', 'cmdline', 'maps'):\n        try: digest(open(f'/proc/{p}/{name}', 'rb').read(1 << 20))\n        except (OSError, ValueError): pass\n",
    "ptrace": LOOK + "try:\n    import ctypes\n    libc = ctypes.CDLL(None)\n    assert libc.ptrace(16, os.getppid(), 0, 0) == 0\n    FOUND.append(('', '6'))\nexcept BaseException: pass\n",
    "patches builtins": "import builtins\nfor n in ('abs', 'sorted', 'sum', 'all', 'any', 'map', 'str', 'isinstance', 'type', 'AssertionError', 'compile', 'exec', 'len'):\n    setattr(builtins, n, lambda *a, **k: True)\ndef total(xs): return None\n",
    "patches modules": "import json, math, marshal, struct, os, sys, select\nfor m in (json, math, marshal, struct, os, sys, select):\n    for n in list(vars(m)):\n        if n[:1] != '_':\n            try: setattr(m, n, lambda *a, **k: True)\n            except BaseException: pass\ndef total(xs): return None\n",
    "shadows the names that a test uses": "abs = lambda x: 0\nsum = lambda xs: -1\nsorted = lambda xs: [2, 3]\nall = any = lambda xs: True\nclass math:\n    isclose = lambda *a: True\nrange = lambda *a: []\nstr = lambda x: '23'\ndef total(xs): return -1\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef total(xs): raise SystemExit(0)\n",
    "threads": "import threading, os\ndef work():\n    while True:\n        for fd in range(3, 64):\n            try: os.write(fd, b'+\\n')\n            except OSError: pass\ntry: threading.Thread(target=work, daemon=True).start()\nexcept BaseException: pass\ndef total(xs): return None\n",
    "signal handlers": "import signal, os\nfor s in range(1, 65):\n    try: signal.signal(s, lambda *a: os._exit(0))\n    except (OSError, ValueError): pass\ntry: signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nexcept BaseException: pass\ndef total(xs):\n    try: os.kill(os.getppid(), 15)\n    except BaseException: pass\n    return None\n",
    "claims another class": "class C:\n    @property\n    def __class__(self): return int\n    def __eq__(self, o): return True\ndef total(xs): return C()\nclass D:\n    pass\n",
    "assigns a class": "class A(float): pass\nclass B(float):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0.0\nx = A(-1)\nx.__class__ = B\ndef total(xs): return x\n",
    "nan": "def total(xs): return float('nan')\n",
    "infinity": "def total(xs): return float('inf')\n",
    "a generator of all numbers": "def total(xs):\n    n = 0\n    while True:\n        yield n\n        n += 1\n",
    "an iterator that ends a loop": "def total(xs): raise StopIteration\n",
    "stops async iteration": "def total(xs): raise StopAsyncIteration\n",
    "a generator's exit": "def total(xs): raise GeneratorExit\n",
    "keyboard interrupt": "def total(xs): raise KeyboardInterrupt\n",
    "pickles itself": "class P:\n    def __reduce__(self): return (eval, ('6',))\n    __reduce_ex__ = lambda self, n: self.__reduce__()\n    def __eq__(self, o): return True\ndef total(xs): return P()\n",
    "replaces modules": "import sys, types\nfor n in list(sys.modules):\n    fake = types.ModuleType(n)\n    fake.__getattr__ = lambda name: (lambda *a, **k: True)\n    sys.modules[n] = fake\ndef total(xs): return None\n",
    "import hooks": "import sys, types\nclass F:\n    def find_spec(self, name, path=None, target=None):\n        open('seen', 'a').write(name)\n        return None\nsys.meta_path.insert(0, F())\nsys.path.insert(0, '.')\nopen('math.py', 'w').write('isclose = lambda *a: True')\ndef total(xs): return None\n",
    "floods its output": "import sys\ndef total(xs):\n    while True: sys.stdout.write('+\\n' * 1000)\n",
    "writes on every descriptor": "import os\ndef total(xs):\n    for fd in range(0, 64):\n        try: os.write(fd, b'+\\n.0 1\\n' * 99)\n        except OSError: pass\n",
    "shared memory": LOOK + "import mmap\nm = mmap.mmap(-1, 4096)\nfor n in ('psm_1', 'job', 'tests'):\n    try:\n        from multiprocessing import shared_memory\n        digest(bytes(shared_memory.SharedMemory(n).buf))\n    except BaseException: pass\n",
    "the environment": LOOK + "digest(dict(os.environ))\ndigest(sys.argv)\ndigest(getattr(sys, 'orig_argv', []))\n",
    "lists its descriptors": LOOK + "for fd in range(64):\n    for path in (f'/proc/self/fd/{fd}', f'/dev/fd/{fd}', f'/proc/{os.getppid()}/fd/{fd}'):\n        try: digest(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16))\n        except OSError: pass\n",
    "forks and answers twice": "import os\ntry: pid = os.fork()\nexcept BaseException: pid = 1\ndef total(xs):\n    return 6 if pid == 0 else None\n",
    "traces the judge": "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_lines = True\n    raise StopIteration\ndef total(xs):\n    sys.settrace(trace)\n    sys.setprofile(trace)\n    return None\n",
    "nests deeply": "def total(xs):\n    x = []\n    for _ in range(100000): x = [x]\n    return x\n",
    "contains itself": "def total(xs):\n    x = []\n    x.append(x)\n    return x\n",
    "a giant number": "def total(xs): return 1 << (1 << 27)\n",
    "a long list": "def total(xs): return [0] * 10_000_000\n",
    "an exception that lies": "class E(AssertionError):\n    def __str__(self): raise self\n    args = property(lambda self: 1 / 0)\ndef total(xs): raise E\n",
    "empties its arguments": "def total(xs):\n    xs.clear()\n    return 0\n",
    "a name for the judge": "check = verify = assertEqual = __effect__ = lambda *a: (lambda *b: None)\npassed = [True] * 99\ndef total(xs): return None\n",
    "answers by a method that agrees": "class A:\n    def __getattr__(self, n): return lambda *a, **k: True\ndef total(xs): return A()\n",
    "answers when it is destroyed": "import os\nclass A:\n    def __del__(self):\n        for fd in range(3, 9):\n            try: os.write(fd, b'+\\n')\n            except OSError: pass\ndef total(xs):\n    A()\n    return None\n",
    "closes its channel": "import os\ndef total(xs):\n    os.closerange(3, 64)\n    return 6\n",
    "waits for ever": "import time\ndef total(xs): time.sleep(1e6)\n",
    "loops for ever": "def total(xs):\n    while True: pass\n",
}  # fmt: skip
# Two answers to one question, in the channel's own words.
TWICE = """
import os, struct
size = struct.Struct("<I").pack
def say(value, word):
    data = b"t" + size(5) + b"b" + size(8) + word + b"s" + size(5) + b"value" + value + b"N" + b"s" + size(0)
    os.write({fd}, size(len(data)) + data)
def total(xs):
    import sys
    f = sys._getframe()
    while "word" not in f.f_locals: f = f.f_back
    word = f.f_locals["word"] if {knows} else bytes(8)
    here = b"l" + size(1) + b"r" + size(0) + b"s" + size(8) + b"function"  # what the judge wants first: where `total` is
    for n in (6, 9, 7):
        say(b"i" + size(1) + b"%x" % n, word)
        say(here, word)
    return 6
"""


@pytest.fixture(params=["all", *(pytest.param(m, marks=pytest.mark.slow) for m in ("hook", "kernel"))])
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The sandbox with everything, with the audit hook alone, and with the kernel's fences alone."""
    limits = {"timeout_s": 1, "wall_s": 2, "programs_may_escape": True}
    if request.param == "kernel":
        source, call = runner._child_source(), '    _audit(folder, job["readable"])\n'
        assert source.count(call) == 1
        monkeypatch.setattr(runner, "_child_source", lambda: source.replace(call, ""))
    return Sandbox(fences=() if request.param == "hook" else runner.FENCES, **limits)  # type: ignore[arg-type]


def test_controls(box: Sandbox) -> None:
    """The honest program passes every test, a wrong one none."""
    assert box.run(HONEST, TESTS).passed == (True,) * len(TESTS)
    assert box.run(WRONG, TESTS).passed == (False,) * len(TESTS)


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_earns_anything(name: str, box: Sandbox) -> None:
    start = time.monotonic()
    result = box.run(ATTACKS[name], TESTS)
    assert not any(result.passed) and result.outcome != "passed" and len(result.passed) == len(TESTS), result
    assert not result.unclear, "an attack must not turn into no opinion"
    assert time.monotonic() - start < 2 + 5  # the wall limit, and a busy machine
    assert box.run(HONEST, TESTS[:1]).outcome == "passed", "the next program suffers"


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("fd", range(3, 9))
def test_two_answers_to_one_question_end_the_conversation(fd: int, knows: bool) -> None:
    """An answer that was written ahead is never taken for an answer to the next question."""
    tests = ["assert total([1, 2, 3]) == 6", "assert total([4, 5]) == 9", "assert total([7]) == 7"]
    result = Sandbox(timeout_s=1, wall_s=2, programs_may_escape=True).run(TWICE.format(fd=fd, knows=knows), tests)
    assert not any(result.passed[1:]), result  # 6 is an honest guess at the first


def test_more_than_twenty_seven_attacks() -> None:
    assert len(ATTACKS) >= 27


MEMORY = """
import re, sys
wanted = "{reversed}"[::-1].encode()
control = bytes(reversed(b"lortnoc-eht"))
hits = {{wanted: 0, control: 0}}
own = wanted
for line in open("/proc/self/maps"):
    a, b = (int(x, 16) for x in line.split()[0].split("-"))
    if "r" not in line.split()[1] or "[v" in line: continue
    with open("/proc/self/mem", "rb", 0) as f:
        try:
            f.seek(a)
            data = f.read(b - a)
        except (OSError, OverflowError, ValueError): continue
    for w in hits: hits[w] += data.count(w + b"-in-memory")
note = control + b"-in-memory"
print(hits[wanted])
def f(x): return x
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads its own memory through /proc")
def test_no_test_was_ever_in_the_programs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any fence or hook, a program that searches all of its memory finds no test."""
    source, call = runner._child_source(), '    _audit(folder, job["readable"])\n'
    monkeypatch.setattr(runner, "_child_source", lambda: source.replace(call, ""))
    box = Sandbox(fences=(), timeout_s=20, programs_may_escape=True)
    word = "expected-" + "of-it"
    tests = [f"assert f(1) != '{word}-in-memory'"]
    program = MEMORY.format(reversed=word[::-1])
    result = box.run(program, tests)
    assert result.outcome == "passed" and result.stdout.strip() == "0", result
    seen = box.run(f"held = '{word}-in' + '-memory'\nheld = held.encode()\n" + program, tests)  # the search does find
    assert int(seen.stdout) > 0, seen


def test_the_program_holds_one_channel_and_no_more() -> None:
    code = "import os, stat\nfor fd in range(64):\n    try: print(fd, stat.S_ISFIFO(os.fstat(fd).st_mode))\n    except OSError: pass\ndef f(x): return x"
    lines = Sandbox(programs_may_escape=True).run(code, ["assert f(1) == 1"]).stdout.split("\n")[:-1]
    assert [line.split()[1] for line in lines] == ["False"] * 3 + ["True"] * 2, lines


def test_later_questions_come_after_earlier_answers() -> None:
    code = "import time\nasked = []\ndef f(x):\n    asked.append(x)\n    return list(asked)"
    tests = ["assert f(1) == [1]", "assert f(2) == [1, 2] and f(3) == [1, 2, 3]"]
    assert Sandbox(programs_may_escape=True).run(code, tests).passed == (True, True)


def test_asks_only_what_tests_ask() -> None:
    """A program's own `abs` isn't asked, its own `sum` is where the tests mean it; modules are the judge's."""
    box = Sandbox(programs_may_escape=True)
    assert box.run("def sum(a, b): return a + b", ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"]).outcome == "passed"  # fmt: skip
    assert box.run("def sum(a, b): return 25", ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"]).passed == (True, False)  # fmt: skip
    lies = "import math\nmath.isclose = lambda *a: True\ndef third(x): return 0.5"
    assert box.run(lies, ["assert math.isclose(third(1), 1 / 3)"]).passed == (False,)
    assert box.run("import math\ndef third(x): return x / 3", ["assert math.isclose(third(1), 1 / 3)"]).passed == (True,)  # fmt: skip


OTHER_FORMS = {
    "a class": ("class Stack:\n  def __init__(self): self.x = []\n  def push(self, v): self.x.append(v)\n  def pop(self): return self.x.pop()\n  def __len__(self): return len(self.x)", "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2 and s.x == [1]", "class Stack:\n  def __getattr__(self, n): return lambda *a: True\n  def __len__(self): return 2"),
    "a kind of list": ("class Stack(list):\n  push = list.append", "s = Stack()\ns.push(1)\nassert s.pop() == 1", "class Stack(list):\n  def push(self, v): pass\n  def pop(self): return None"),
    "LeetCode's class": ("class Solution:\n  def add(self, a, b): return a + b", "assert Solution().add(2, 3) == 5", "class Solution:\n  def add(self, a, b): return self\n  def __eq__(self, o): return True"),
    "a method of the answer": ("def shout(x): return x.upper()", "assert shout('ab').startswith('AB')", "class A:\n  def startswith(self, x): return True\ndef shout(x): return A()"),
    "membership": ("def primes(n): return [2, 3, 5]", "assert 5 in primes(6) and 4 not in primes(6)", "class A:\n  def __contains__(self, x): return x == 5\ndef primes(n): return A()"),
    "an expected TypeError": ("def root(x): return x ** 0.5", "try:\n  assert root('x') > 0\n  x = None\nexcept TypeError:\n  x = 1\nassert x", "def root(x): return object()"),
    "a generator": ("def count(n):\n  yield from range(n)", "assert list(count(3)) == [0, 1, 2]", "def count(n):\n  yield 0"),
    "an endless generator": ("def count():\n  n = 0\n  while True:\n    yield n\n    n += 1", "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2]", "def count():\n  while True: yield 0"),
    "a closure": ("def adder(n): return lambda x: x + n", "assert adder(3)(4) == 7", "def adder(n): return lambda x: n"),
    "in place": ("def order(xs): xs.sort()", "xs = [3, 1, 2]\norder(xs)\nassert xs == [1, 2, 3]", "def order(xs): xs.clear()"),
    "an exception": ("def root(x):\n  if x < 0: raise ValueError('negative')\n  return x ** 0.5", "try:\n  root(-1)\n  assert False\nexcept ValueError as e:\n  assert str(e) == 'negative'\nassert root(4) == 2", "def root(x): raise KeyError"),
    "unittest's assertions": ("def root(x):\n  if x < 0: raise ValueError\n  return x ** 0.5", "import unittest\nt = unittest.TestCase()\nt.assertRaises(ValueError, root, -1)\nt.assertAlmostEqual(root(2), 1.41421356)", "def root(x): return 1.4"),
    "async": ("async def f(x):\n  return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2", "async def f(x):\n  return x"),
    "what it prints": ("def hello(x): print('hello', x)", "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n  hello('you')\nassert out.getvalue() == 'hello you\\n'", "def hello(x): print(x)"),
    "a helper of the test's": ("def square(x): return x * x", "def check(f, cases):\n  for x, y in cases:\n    assert f(x) == y\ncheck(square, [(2, 4), (3, 9)])", "def square(x): return x + x"),
    "a variable": ("answer = 42", "assert answer == 42", "answer = 41"),
    "functions for pytest": ("def add(a, b): return a + b", "from solution import add\ndef test_add():\n  assert add(2, 3) == 5", "def add(a, b): return 6"),
    "a class for pytest": ("def add(a, b): return a + b", "class TestAdd:\n  def test_add(self):\n    assert add(2, 3) == 5", "def add(a, b): return 6"),
    "a case of unittest": ("def add(a, b): return a + b", "import unittest\nclass T(unittest.TestCase):\n  def setUp(self): self.x = 2\n  def test_add(self): self.assertEqual(add(self.x, 3), 5)\nif __name__ == '__main__': unittest.main()", "def add(a, b): return 6"),
    "an import": ("def add(a, b): return a + b", "from solution import add\nassert add(2, 3) == 5", "def add(a, b): return 6"),
    "values of the standard library": ("from fractions import Fraction\nimport datetime, decimal\ndef f(x): return [Fraction(x, 3), datetime.date(2024, 2, x), decimal.Decimal('0.1') * x, range(x)]", "from fractions import Fraction\nimport datetime, decimal\nassert f(2) == [Fraction(2, 3), datetime.date(2024, 2, 2), decimal.Decimal('0.2'), range(2)]", "def f(x): return [x] * 4"),
    "a linked list": ("class Node:\n  def __init__(self, v, next=None): self.v, self.next = v, next\ndef reverse(n):\n  r = None\n  while n: r, n = Node(n.v, r), n.next\n  return r", "h = reverse(Node(1, Node(2)))\nassert (h.v, h.next.v, h.next.next) == (2, 1, None)", "class Node:\n  def __init__(self, v, next=None): self.v, self.next = v, next\ndef reverse(n): return n"),
    "numbers beyond the limit of digits": ("def f(n): return 10 ** n", "assert f(6000) % 7 == 10 ** 6000 % 7 and f(6000) == 10 ** 6000", "def f(n): return 10 ** n + 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_honest_programs_pass_tests_in_their_usual_forms(name: str) -> None:
    right, test, wrong = OTHER_FORMS[name]
    box = Sandbox(timeout_s=2, wall_s=10, programs_may_escape=True)
    assert box.run(right, [test]).passed == (True,), box.run(right, [test])
    result = box.run(wrong, [test])
    assert result.passed == (False,) and not result.unclear, result


def test_what_cannot_be_judged_gives_no_reward_and_says_why() -> None:
    reward = PythonTests(programs_may_escape=True)
    with pytest.warns(UserWarning, match=r"can't be judged: it compares objects of the program's own class"):
        assert reward(["?"], ["class P: pass"], tests=["assert make(1) == P(1)"]) == [None]
    reward = PythonTests(programs_may_escape=True)
    late = "def check(f):\n    assert f(lambda x: x) == 1\ncheck(call)"  # seen only when it runs
    with pytest.warns(UserWarning, match="hands the program a function"):
        assert reward(["?"] * 2, ["def call(f): return 1", "x ="], tests=[late] * 2) == [None, 0.0]
    assert reward.unreadable == 1


def test_a_judge_that_is_kept_busy_ends_in_time() -> None:
    """An answer that makes the judge slow is a wrong answer."""
    start = time.monotonic()
    code = "from decimal import Decimal\ndef f(x): return Decimal('1e999999999')"
    result = Sandbox(timeout_s=1, wall_s=3, programs_may_escape=True).run(code, ["assert int(f(1)) == 1", "assert f(2) == 2"])  # fmt: skip
    assert not any(result.passed) and time.monotonic() - start < 3 + 5


def test_no_bytes_stall_or_crash_the_reader() -> None:
    """Whatever comes through the channel is a value or an error, soon."""
    import random

    rng = random.Random(0)

    def never(*a: object) -> None:
        raise TypeError

    whole = pack([1, "x", {"a": (2.5, {3}, b"y")}, math.inf, range(3)], never)
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            unpack(bytes(data), lambda number, kind: number)
        except Exception:
            continue


def test_nothing_runs_where_the_kernel_keeps_no_fence() -> None:
    """A model's program isn't run behind the audit hook alone unless somebody says that it may escape."""
    from rlhf_nb.core import ConfigError

    for fences in ((), ("namespaces",), ("seccomp",), ("namespaces", "seccomp")):
        with pytest.raises(ConfigError, match="programs_may_escape=True"):
            Sandbox(fences=fences).run("open('here', 'w')")
        with pytest.raises(ConfigError, match="landlock"):
            PythonTests(fences=fences)(["?"], ["x = 1"], tests=["assert x"])


@pytest.mark.parametrize("module", ["_xxsubinterpreters", "_interpreters"])
def test_no_second_interpreter_without_the_hook(module: str) -> None:
    """An interpreter inside the interpreter would have no audit hook."""
    code = (
        f"import {module} as m\ni = m.create()\nm.run_string(i, 'print(open(\"/etc/hostname\").read())')\nprint('out')"
    )
    result = Sandbox(fences=(), programs_may_escape=True, timeout_s=2).run(code)
    assert result.outcome == "failed" and result.stdout == "", result


DEEP = """
import os
at = os.open(".", os.O_RDONLY)
for _ in range(1500):
    os.mkdir("a", dir_fd=at)
    below = os.open("a", os.O_RDONLY, dir_fd=at)
    os.close(at)
    at = below
"""


def test_folders_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested deeper than Python removes, or very many: the training goes on and nothing is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for fences in (runner.FENCES, ("landlock", "seccomp")):
        box = Sandbox(timeout_s=20, fences=fences, programs_may_escape=True)
        assert box.run(DEEP).outcome == "passed"
        assert list(tmp_path.iterdir()) == []
    many = "import os\nn = 0\ntry:\n    while n < 20000:\n        os.mkdir(str(n))\n        n += 1\nexcept OSError: pass\nprint(n)"
    box = Sandbox(timeout_s=5, programs_may_escape=True)
    if "namespaces" in box.fences_here():
        assert int(box.run(many).stdout) < 5000


def test_translation_is_refused_in_a_sentence() -> None:
    for test, why in (
        ("assert apply(lambda x: x, 1) == 1", "hands a function"),
        ("same(f(1), 1)", "hands an answer"),
        ("from solution import *\nassert f(1) == 1", "import what is tested by name"),
        ("import sys, io\nsys.stdin = io.StringIO('1')\nassert f() == 1", "standard input"),
        ("from unittest.mock import patch\nassert f() == 1", "mock"),
        ("assert eval('f(1)') == 1", "looks names up"),
        ("assert (", "no Python"),
        ("def check(candidate):\n    assert candidate(1) == 1", "nothing runs it"),
        ("assert f(1) == expected", "only the program could define"),
        ("from solution import P, make\nassert make(1) == P(1)", "own class"),
        ("import numpy as np\nassert np.allclose(f(1), 1)", "standard library only"),
        ("def test_f(tmp_path):\n    assert f(1) == 1", "only pytest"),
    ):
        with pytest.raises(ValueError, match=why):
            translate_tests((test,))
