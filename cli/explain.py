"""``splitkv explain``: which backend takes a request, and why the others do not. Runs nothing."""

import argparse

from splitkv.backends.ascend import AscendBackend
from splitkv.backends.registry import BACKENDS, backend_named, explain, reasons
from splitkv.cli.output import print_json, print_table
from splitkv.cli.spec_arguments import add_spec_arguments, spec_from, spec_json
from splitkv.common.spec import DecodeSpec
from splitkv.common.support import UnsupportedError

HELP = (
    "Which backend takes a request, and why the others do not; nothing runs. "
    "Exits 1 if none takes it, or not the one that --backend names."
)


def configure(parser: argparse.ArgumentParser) -> None:
    devices = [backend.device_type for backend in BACKENDS]
    parser.add_argument("--device", choices=devices, help="of the tensors (default: any)")
    parser.add_argument("--backend", help="ask for this one, as a call with backend=... does")
    parser.add_argument(
        "--emit",
        choices=["torch_npu"],
        help="print the operator call of the chosen Ascend route as Python, and nothing else",
    )
    parser.add_argument(
        "--all", action="store_true", help="the routes of Ascend too, where nothing of it is here"
    )
    group = parser.add_argument_group("the Ascend backend (each of these shows its routes)")
    add = group.add_argument
    add("--soc", help="decide for this chip: 910B, 910_93, 310P, 950 (default: this machine's)")
    add("--route", help="ask for this route of the Ascend backend")
    add("--loose", action="store_true", help="where sources on a limit disagree, take the wider")
    add("--no-lse", action="store_true", help="the output alone will do, without an LSE")
    add_spec_arguments(parser)


def run(args: argparse.Namespace) -> int:
    spec = spec_from(args)
    ascend = _ascend(args)
    if args.backend is not None:
        backend_named(args.backend)
    if args.emit is not None:
        if args.backend not in (None, "ascend"):
            raise ValueError(f"--emit {args.emit} is a call of ascend, not of {args.backend}")
        return _emit(spec, ascend, args.json)
    answers = explain(spec, args.device) | {ascend.name: reasons(ascend, spec, args.device)}
    asked = answers if args.backend is None else {args.backend: answers[args.backend]}
    chosen = next((name for name, reasons in asked.items() if not reasons), None)
    if args.json:
        _print_json(spec, ascend, chosen, answers)
    else:
        _print_text(args, spec, ascend, chosen, answers)
    return 0 if chosen is not None else 1


def _print_json(
    spec: DecodeSpec, ascend: AscendBackend, chosen: str | None, answers: dict[str, list[str]]
) -> None:
    choice = ascend.choice(spec)
    routes = {
        "soc": ascend.wants.soc.value,
        "route": None if choice.route is None else choice.route.name,
        "against": dict(choice.against),
        "warnings": _warnings(spec),
    }
    print_json({"chosen": chosen, "spec": spec_json(spec), "reasons": answers, "ascend": routes})


def _print_text(
    args: argparse.Namespace,
    spec: DecodeSpec,
    ascend: AscendBackend,
    chosen: str | None,
    answers: dict[str, list[str]],
) -> None:
    print(", ".join(f"{name} {value}" for name, value in spec_json(spec).items() if value))
    asked = "" if args.backend is None else f" ({args.backend} is asked for, no other counts)"
    print(f"chosen: {chosen or 'none'}{asked}")
    print_table(
        ("backend", "reasons against it"),
        ((name, "\n".join(reasons) or "none") for name, reasons in answers.items()),
    )
    if args.backend not in (None, "ascend") or args.device not in (None, ascend.device_type):
        return
    if not _shows_routes(args, ascend):
        print("\nthe routes of ascend: --all")
        return
    choice = ascend.choice(spec)
    print(f"\nroute on {ascend.wants.soc}: {ascend.route(spec) or 'none'}")
    rows = {name: "\n".join(reasons) for name, reasons in choice.against.items()}
    if choice.route is not None:
        rows = {choice.route.name: "none, it is chosen", **rows}
    print_table(("route of ascend", "reasons against it"), rows.items())
    for warning in _warnings(spec):
        print(f"on ascend: {warning}")


def _shows_routes(args: argparse.Namespace, ascend: AscendBackend) -> bool:
    """Whether they were asked for, or this machine can take them."""
    flags = args.soc is not None or args.route is not None or args.loose or args.no_lse
    named = args.backend is not None or args.device is not None
    return args.all or flags or named or ascend.missing() is None


def _warnings(spec: DecodeSpec) -> list[str]:
    """What the Ascend backend would warn of."""
    from splitkv.kernels_ascend.routes import page_warning

    found = None if spec.page_size is None else page_warning(spec.page_size)
    return [] if found is None else [found]


def _ascend(args: argparse.Namespace) -> AscendBackend:
    from splitkv.kernels_ascend.routes import route_named
    from splitkv.kernels_ascend.soc import soc_named

    if args.route is not None:
        route_named(args.route)
    return AscendBackend(
        soc=None if args.soc is None else soc_named(args.soc),
        strict=not args.loose,
        route=args.route,
        needs_lse=not args.no_lse,
    )


def _emit(spec: DecodeSpec, ascend: AscendBackend, as_json: bool) -> int:
    from splitkv.kernels_ascend.emit import emit

    try:
        if reasons := ascend.refusals(spec):
            raise UnsupportedError("\n".join(["no route serves this", *reasons]))
        text = emit(spec, ascend.wants)
    except UnsupportedError as refusal:
        if as_json:
            print_json({"source": None, "reasons": str(refusal).splitlines()})
        else:
            print(refusal)
        return 1
    if as_json:
        print_json({"source": text, "warnings": _warnings(spec)})
    else:
        print("".join(f"# {warning}\n" for warning in _warnings(spec)) + text, end="")
    return 0
