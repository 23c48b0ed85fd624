"""The runtime does nothing unsafe with what it reads, and keys separate their holders.

Only the paths of probes are open without a key.
"""

from __future__ import annotations

import ast
import re
import stat
from pathlib import Path

import httpx
import msgspec
import pytest

from serving.api import page_files
from serving.api.access import OPEN_PATHS
from serving.api.api_keys import ApiKeys, Rights
from serving.engine.process import EngineProcess
from serving.text import template_bounds
from serving.text.chat_template import ChatTemplate
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.test_imports import MAY_IMPORT, ROOT, files, name, nodes, text

RUNTIME = files(*MAY_IMPORT)
KEYS = "first-key tenant-a\nsecond-key tenant-b\nthird-key\n"
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "xmlrpc", "telnetlib"}


# Only files with one of these words are parsed, since all of them would take seconds
UNSAFE_WORDS = re.compile(
    "|".join(UNSAFE)
    + r"|\b(eval|exec|__import__|os\.system|yaml\.(unsafe_)?load|torch\.load|load_pickle|(recv|send)_pyobj)\b"
    r"|\b(trust_remote_code|shell|allow_pickle)="
)


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    """CVE-2024-11041, CVE-2025-30165, CVE-2025-32434 and their kind: bytes that run when they are read.

    Nor does anything load weights but safetensors, nor code of a model's own, nor YAML with objects, nor call
    a shell. Ruff's rules of what is unsafe (S) know most of it, but not who is excused by a comment.
    """
    found = []
    for path in RUNTIME:
        if not UNSAFE_WORDS.search(text(path)):
            continue
        for node in nodes(path):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(name(path), each) for each in modules if each.partition(".")[0] in UNSAFE]
            if isinstance(node, ast.Call) and is_unsafe(node):
                found.append((name(path), ast.unparse(node)))
    assert not found


def is_unsafe(call: ast.Call) -> bool:
    said = ast.unparse(call.func)
    values = {each.arg: each.value for each in call.keywords}
    on = {
        arg for arg, each in values.items() if not isinstance(each, ast.Constant) or each.value is not False
    }
    return (
        said in ("eval", "exec", "__import__", "os.system", "yaml.load", "yaml.unsafe_load")
        or said.endswith(("torch.load", "load_pickle", ".recv_pyobj", ".send_pyobj"))
        or not on.isdisjoint(("trust_remote_code", "shell", "allow_pickle"))
    )


def test_the_server_fetches_nothing() -> None:
    """Nothing in the serving rooms can open a connection to where a request says."""
    clients = re.compile(
        r"^\s*(?:import|from) (requests|urllib(?!\.parse)|httpx|aiohttp|http\.client|socket)\b", re.MULTILINE
    )
    served = [
        path for path in RUNTIME if name(path).startswith(("serving/", "continuous_batching/", "models/"))
    ]
    found = {name(path) for path in served if clients.search(path.read_text(encoding="utf-8"))}
    # to the collector that the command line names; a client of the server; incoming connections;
    # connections that the ranks of an engine have made already; the replicas that a router's operator names
    ours = {"serving/metrics/traces.py", "serving/terminal_view.py", "serving/router/server.py"}
    ours |= {f"serving/router/{each}.py" for each in ("upstream", "membership")}
    ours |= {f"continuous_batching/recording/{each}.py" for each in ("follower", "listeners")}
    assert found <= ours | {"serving/server.py", "serving/tls.py", "serving/api/protocol.py"}


def test_only_this_user_can_reach_the_engine() -> None:
    engine = EngineProcess([])
    try:
        assert stat.S_IMODE(engine._folder.stat().st_mode) == 0o700
    finally:
        engine.socket.close()
        engine._folder.rmdir()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
            "{% set d = a %}{% endfor %}{% endfor %}{% endfor %}",
            "took more than",
        ),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses these messages"),
        ("{{ range(10**9) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ 'a'.encode().center(9) }}", "refuses these messages"),
        ("{{ (1)|attr('to_bytes')(9, 'big') }}", "refuses these messages"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
            "took more than",
        ),
    ],
    ids=["loops", "recursion", "range", "class", "subclasses", "change", "text", "number", "macro"],
)
def test_a_template_has_no_way_out_and_no_time_to_waste(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChatTemplate(source, {}, most_s=0.2).render([{"role": "user", "content": "a"}])


DOUBLED = "{% set ns = namespace(a=['aa']) %}{% for i in range(60) %}{% set ns.a = "
LARGE = "{% set a = 'a' * 3 * 10**5 %}"  # less than a text may be, and many of them more than all may be
BOMBS = (
    "{{ 'a' * 10**9 }}", "{{ 10**9 * 'a' }}", "{{ [1] * 10**9 }}", "{{ 2**9999 }}",
    "{{ (10**900) * (10**900) }}",
    *(f"{DOUBLED}{each} %}}{{% endfor %}}{{{{ ns.a }}}}"
      for each in ("ns.a + ns.a", "[ns.a, ns.a]", "ns.a|string ~ ns.a")),
    *(f"{DOUBLED}[ns.a, ns.a] %}}{{% endfor %}}{{{{ {each} }}}}"
      for each in ("ns.a|tojson", "ns.a|string", "'%s' % ns.a", "'{}'.format(ns.a)", "ns.a ~ 'x'")),
    "{{ 'a'|center(10**9) }}", "{{ 'a'.ljust(10**9) }}", "{{ ('\t' * 1000).expandtabs(10**7) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}", "{{ '%1000000000d'|format(1) }}",
    "{{ ('%999999s' * 99) % ((1,) * 99) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}", "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('b' * 10**5).join(['a'] * 10**6) }}", "{{ (['a' * 10**6] * 10**4)|join('') }}",
    "{{ range(99999)|map('string')|join(',' * 10**5) }}", "{{ messages|tojson(indent=10**9) }}",
    "{{ ('a\n' * 10**6)|indent(10**5) }}", "{{ ('a ' * 10**6)|wordwrap(1, true, 'x' * 10**5) }}",
    LARGE + "{% for i in range(9999) %}{{ a }}{% endfor %}",
    LARGE + "{% set b %}{% for i in range(9999) %}{{ a }}{% endfor %}{% endset %}{{ b|length }}",
    "{% for i in range(99999) %}{% set x = ('a' * 3 * 10**5)|upper %}{% endfor %}",
    "{{ 'a'.translate({97: 'b' * 10**9}) }}", "{{ lipsum(n=10**6) }}", "{{ [1]|batch(10**9, 'x')|list }}",
)  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_makes_no_more_than_it_may(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would make is refused before it is made; most of these would take gigabytes or hours.

    With bounds of a 32nd, since up to them a template does take its time.
    """
    for bound in ("MOST_TEXT", "MOST_WORK"):
        monkeypatch.setattr(template_bounds, bound, getattr(template_bounds, bound) // 32)
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "source", [BOMBS[5], "{% set a = 'a' * 10**7 %}{% for i in range(99) %}{{ a }}{% endfor %}"]
)
def test_so_it_is_with_the_bounds_that_are_in_force(source: str) -> None:
    with pytest.raises(ValueError, match=r"more than 33,554,432 characters"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


WIDE = (
    *(f"'{each}' % 1" for each in ("%.9999999f", "%-9999999s", "%%%9999999s", "%5%%9999999s")),
    *(f"'{each}' % {{'a': 1, '(a)b': 1, 'a%': 1}}"
      for each in ("%(a)9999999s", "%((a)b)9999999s", "%(a%)9999999s", "%(a)%%(a)9999999s")),
    "'%.*f' % (10**7, 1)", "'%9999999d'|format(1)", "['%9999999d']|format(1)",
    "'{:9999999}'.format(1)", "'{:\u0669999999}'.format(1)", "'{:{}}'.format(1, 9)",
    "'{a[}]:{w}}'.format(a={'}': 1}, w=9)",
)  # fmt: skip


@pytest.mark.parametrize("source", WIDE)
def test_a_format_has_no_wide_width_and_none_of_an_argument(source: str) -> None:
    with pytest.raises(ValueError, match="a format has a width above 6 digits"):
        ChatTemplate(f"{{{{ {source} }}}}", {}).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ('{"a": {"b": "%s"}}', "'x'", '{"a": {"b": "x"}}'),
        ("Today 20261201 %s", "'x'", "Today 20261201 x"),
        ("100%% 20261201 * %5.1f", "2", "100% 20261201 *   2.0"),
        ("%s (20261201) *", "'x'", "x (20261201) *"),
        ("{%(a)3s} 20261201", "{'a': 1}", "{  1} 20261201"),
    ],
)
@pytest.mark.parametrize("notation", ["%", "|format"])
def test_only_what_follows_a_percent_sign_is_a_width(notation: str, text: str, value: str, said: str) -> None:
    given = {"%": f"% {value}", "|format": f"|format({'**' * value.startswith('{')}{value})"}[notation]
    source = f"{{{{ '{text}' {given} }}}}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}]) == said


def test_what_templates_do_is_what_it_was() -> None:
    source = (
        "{% set ns = namespace(t='') %}"
        "{% for m in messages %}{% set ns.t = ns.t ~ m.content + '\n' %}{% endfor %}"
        "{{ ns.t|trim }}{{ '%5d' % 7 }}{{ '{:>4}'.format('a') }}{{ [1, 2] + [3] }}{{ 'ab' * 2 }}{{ 2 ** 5 }}"
        "{{ 'a-b'.replace('-', '+') }}{{ ['x', 1]|join('/') }}{{ messages|map(attribute='role')|join }}"
        "{{ {'a': [1, 'ü']}|tojson(indent=1) }}{{ 'abc'|upper|center(5) }}{{ 7 % 4 }}{{ range(3)|list }}"
    )
    said = ChatTemplate(source, {}).render(
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert said == ('a\nb    7   a[1, 2, 3]abab32a+bx/1useruser{\n "a": [\n  1,\n  "ü"\n ]\n} ABC 3[0, 1, 2]')


def test_keys_are_compared_in_constant_time() -> None:
    source = (ROOT / "serving/api/api_keys.py").read_text()
    assert "hmac.compare_digest" in source
    assert not re.search(r"\bkey\s*==|==\s*key\b", source)
    keys = ApiKeys({"a": Rights("x"), "b": Rights()})
    assert keys.client("Bearer a") is keys.client("bearer  a")
    for wrong in (
        None,
        "",
        "a",
        "Basic a",
        "Bearer",
        "Bearer c",
        "Bearer a b",
        "Bearer \xff",
        "Bearer " + "a" * 9999,
    ):
        assert keys.client(wrong) is None
    salts = {keys.client(f"Bearer {key}").salt for key in "ab"}
    assert len(salts) == 2
    assert "" not in salts


def test_every_path_but_probes_needs_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    server = Server(TINY, "--api-keys", str(tmp_path / "keys"), "--host", "127.0.0.1").ready()
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            known = client.get("/openapi.json", headers={"authorization": "Bearer first-key"}).json()["paths"]
            known = set(known) | {
                "/live",
                "/page/",
                "/page/page.html",
                "/metrics",
                "/openapi.json",
                "/docs",
                "/redoc",
                "/nowhere",
            }
            assert len(known) > 10
            for path in sorted(known):
                for method in ("GET", "POST"):
                    status = client.request(method, path.replace("{request_id}", "a")).status_code
                    assert status == 401 or path in OPEN_PATHS, (method, path)
            assert {*OPEN_PATHS} - {*page_files.PATHS} == {"/", "/health", "/ready"}
            _no_key_finds_what_another_sent(client)
            _no_key_ends_what_another_asked(client)
            _no_refusal_tells_a_salt(client)
    finally:
        assert server.close() == 0
    assert not [line for line in server.log if re.search("(first|second|third)-key", line)]


def _of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _no_key_finds_what_another_sent(client: httpx.Client) -> None:
    """By the tokens found in the cache, which is all that a time could tell."""

    def num_cached(key: str, number: int, **more: str) -> int:
        prompt = f"{number:04d}" * 80  # 20 pages
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        answer = client.post("/v1/completions", json=body, headers=_of(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for number in range(8):
        assert num_cached("first-key", number) == 0
        assert num_cached("second-key", number) == 0
        assert num_cached("third-key", number, cache_salt="") == 0
        assert num_cached("first-key", number, cache_salt="mine") == 0
        assert num_cached("first-key", number) > 100
        assert num_cached("second-key", number) > 100


def _no_key_ends_what_another_asked(client: httpx.Client) -> None:
    body = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers=_of("first-key")) as response:
        lines = (line for line in response.iter_lines() if line)  # kept: without it the response is closed
        path = "/abort/" + msgspec.json.decode(next(lines).removeprefix("data: "))["id"]
        assert client.post(path, headers=_of("second-key")).status_code == 404
        assert client.post(path, headers=_of("first-key")).json()["aborted"] == 1
        assert "the request was aborted" in [*lines][-2]


def _no_refusal_tells_a_salt(client: httpx.Client) -> None:
    for size, status in ((1000, 200), (1024, 200), (1025, 400)):
        body = {"prompt": "1+1=", "max_tokens": 1, "cache_salt": "a" * size}
        response = client.post("/v1/completions", json=body, headers=_of("first-key"))
        assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] == "cache_salt: string should have at most 1024 characters"
    assert error["param"] == "cache_salt"
    half = '{"prompt": "1+1=", "cache_salt": "a\\ud800"}'
    headers = _of("first-key") | {"content-type": "application/json"}
    assert client.post("/v1/completions", content=half, headers=headers).status_code == 400
