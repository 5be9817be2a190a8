"""Runs Metal kernels without Metal: MLX's own printed source, compiled for the CPU and checked.

Inside `with StandIn() as gpu:` every kernel that `mx.fast.metal_kernel` makes is run by the
stand-in of `metal_stand_in.h`, at the moment it is called, with the arguments of that very call.
So the code under test is the code a Mac runs, launch parameters and all.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.scan import metal_form

HEADER = Path(__file__).with_name("metal_stand_in.h")
COMPILER_FLAGS = (
    # Metal is C++14. Contraction and vectorising would blur what a fault changed.
    *("-std=c++14", "-O1", "-fPIC", "-ffp-contract=off", "-fno-fast-math"),
    # Two loaded kernels must not share what a header declares inline.
    "-fvisibility=hidden",
    *(
        "-U_FORTIFY_SOURCE",
        "-Wall",
        "-Werror=uninitialized",
        "-Wno-attributes",
        "-Wno-unknown-pragmas",
    ),
)
_EXPORTED = 'extern "C" __attribute__((visibility("default")))'
_NUMPY = {
    mx.float32: np.float32,
    mx.float16: np.uint16,
    mx.bfloat16: np.uint16,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
}


class StandInError(Exception):
    """The stand-in cannot run a kernel at all: no compiler, or text that does not compile."""


class KernelFault(AssertionError):
    """The kernel did something that a GPU would not report."""


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("reads", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(_Buffer)),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order_seed", ctypes.c_uint32),
        ("flush_denormals", ctypes.c_uint32),
        ("step_limit", ctypes.c_uint64),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("shuffles", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Dispatch:
    """One kernel run, as it was.

    Attributes:
        kernel: The name MLX gave the variant.
        grid: Threads in each direction.
        threadgroup: Threads of a threadgroup in each direction.
        reads: Per input, how often each element was read.
        unwritten: Per output, how many elements nobody wrote.
        barriers: Barriers passed, over all threadgroups.
        shuffles: Shuffles carried out, over all SIMD groups.
        threadgroup_bytes: Threadgroup memory declared.
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    reads: dict[str, np.ndarray]
    unwritten: dict[str, int]
    barriers: int
    shuffles: int
    threadgroup_bytes: int


@dataclass
class StandIn:
    """A context in which Metal kernels run on the CPU.

    Attributes:
        edits: Replacements (old, new) made in the kernels' bodies and headers, to plant faults.
        order_seed: In which order SIMD groups and lanes take turns: 0 forward, 1 backward, else
            shuffled.
        flush_denormals: Float arithmetic flushes denormals to zero, as Apple's GPUs do (on x86).
        dispatches: What ran so far.
    """

    edits: tuple[tuple[str, str], ...] = ()
    order_seed: int = 0
    flush_denormals: bool = False
    dispatches: list[Dispatch] = field(default_factory=list)
    _written: dict[int, tuple[mx.array, np.ndarray]] = field(default_factory=dict)
    _real: Any = None

    def __enter__(self) -> StandIn:
        self._real = mx.fast.metal_kernel
        mx.fast.metal_kernel = self._make_kernel
        metal_form._kernel.cache_clear()
        return self

    def __exit__(self, *_: object) -> None:
        mx.fast.metal_kernel = self._real
        metal_form._kernel.cache_clear()
        self._written.clear()

    def _make_kernel(self, *, source: str, header: str = "", **options: Any) -> Any:
        if not options.get("ensure_row_contiguous", True):
            raise StandInError("The stand-in models only kernels whose inputs MLX makes dense.")
        for old, new in self.edits:
            source, header = source.replace(old, new), header.replace(old, new)
        real = self._real(source=source, header=header, **options)

        def call(*, inputs: list[mx.array], **launch: Any) -> list[mx.array]:
            text = printed_source(real, inputs, launch)
            names = options["input_names"], options["output_names"]
            return self._run(text, names, inputs, launch)

        return call

    def _run(
        self,
        text: str,
        names: tuple[list[str], list[str]],
        inputs: list[mx.array],
        launch: dict[str, Any],
    ) -> list[mx.array]:
        input_names, output_names = names
        arrays = [_to_numpy(a) for a in inputs]
        written = [
            self._written[id(a)][1] if id(a) in self._written else np.ones(a.size, np.uint8)
            for a in inputs
        ]
        for shape, dtype in zip(launch["output_shapes"], launch["output_dtypes"], strict=True):
            arrays.append(np.full(shape, 0xA5A5A5A5 & _mask(dtype), _unsigned(dtype)))
            written.append(np.zeros(arrays[-1].size, np.uint8))
        reads = [np.zeros(a.size, np.uint32) for a in arrays]
        buffers = (_Buffer * len(arrays))(
            *(
                _Buffer(a.ctypes.data, a.size, r.ctypes.data, w.ctypes.data)
                for a, r, w in zip(arrays, reads, written, strict=True)
            )
        )
        message = ctypes.create_string_buffer(512)
        run = _Launch(
            buffers=buffers,
            grid=launch["grid"],
            group=launch["threadgroup"],
            order_seed=self.order_seed,
            flush_denormals=self.flush_denormals,
            # Far beyond what a thread of these kernels does: 32 rows of 32 rounds of 30 accesses.
            step_limit=1_000_000 + 50_000 * math.prod(launch["grid"]),
            message=ctypes.cast(message, ctypes.c_char_p),
            message_bytes=len(message),
        )
        library, kernel = load(text)
        library.stand_in_run(ctypes.byref(run))
        if message.value:
            raise KernelFault(f"{kernel.split('__')[0]}: {message.value.decode()}")

        outputs = []
        for array, flags, dtype in zip(
            arrays[len(inputs) :],
            written[len(inputs) :],
            launch["output_dtypes"],
            strict=True,
        ):
            output = mx.array(array).view(dtype)
            outputs.append(output)
            self._written[id(output)] = (output, flags)
        self.dispatches.append(
            Dispatch(
                kernel=kernel,
                grid=launch["grid"],
                threadgroup=launch["threadgroup"],
                reads=dict(zip(input_names, reads[: len(inputs)], strict=True)),
                unwritten={
                    name: int((flags == 0).sum())
                    for name, flags in zip(output_names, written[len(inputs) :], strict=True)
                },
                barriers=run.barriers,
                shuffles=run.shuffles,
                threadgroup_bytes=run.threadgroup_bytes,
            )
        )
        return outputs


def metal_gpu(**options: Any) -> Any:
    """Open the GPU the kernel tests run on: the machine's own on a Mac, else the stand-in."""
    return nullcontext(None) if mx.metal.is_available() else StandIn(**options)


def printed_source(kernel: Any, inputs: list[mx.array], launch: dict[str, Any]) -> str:
    """Have MLX print the Metal source it would compile for this call."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as captured:
        saved = os.dup(1)
        os.dup2(captured.fileno(), 1)
        try:
            mx.export_function(
                lambda _: None,
                lambda *xs: kernel(inputs=list(xs), **launch, verbose=True),
                *inputs,
            )
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        captured.seek(0)
        printed = captured.read().decode()
    found = re.search(r"```\n(.*)\n```", printed, re.DOTALL)
    if not found:
        raise StandInError(f"MLX printed no kernel source, but: {printed[:500]!r}")
    return found.group(1)


def harness(text: str) -> tuple[str, str]:
    """Turn printed Metal source into a C++ file that the stand-in runs.

    The text stays as it is but for three kinds of declarations: buffers among the parameters,
    threadgroup arrays, and the explicit instantiation at the end (which becomes the call).

    Returns:
        The C++ text, and the kernel's name.
    """
    signature = re.search(
        r"(?P<template>template <[^>]*>\n)?\[\[kernel\]\] void (?P<name>\w+)\(\n"
        r"(?P<list>.*?)\) \{\n",
        text,
        re.DOTALL,
    )
    if not signature:
        raise StandInError(f"No kernel signature in what MLX printed: {text[:500]!r}")
    name = signature["name"]
    parameters, arguments = [], []
    for parameter in signature["list"].split(",\n"):
        buffer = re.fullmatch(
            r"\s*(?P<const>const )?(?P<space>device|constant) (?P<type>\w+)(?P<mark>[*&]) "
            r"(?P<name>\w+) \[\[buffer\((?P<index>\d+)\)\]\]",
            parameter,
        )
        if buffer is None:
            attribute = re.fullmatch(r"\s*(\w+) (\w+) \[\[(\w+)\]\]", parameter)
            if attribute is None:
                raise StandInError(f"Unknown kind of parameter: {parameter!r}")
            parameters.append(f"{attribute[1]} {attribute[2]}")
            arguments.append(f"thread_place.{attribute[3]}")
            continue
        here = f'{{&launch.buffers[{buffer["index"]}], "{buffer["name"]}"}}'
        if buffer["const"] is None:
            kind = f"stand_in::Output<{buffer['type']}>"
        else:
            kind = f"stand_in::Input<{buffer['type']}, stand_in::Space::{buffer['space']}_memory>"
        by_value = buffer["mark"] == "&"
        parameters.append(f"{'const ' + buffer['type'] if by_value else kind} {buffer['name']}")
        arguments.append(f"{kind}{here}[0]" if by_value else f"{kind}{here}")

    body = text[signature.end() :]
    instance = re.search(r"\ntemplate \[\[host_name.*decltype\((?P<call>.*)\) (?P=call);\n", body)
    call = name
    if instance:
        call, body = instance["call"], body[: instance.start()]
    body = re.sub(
        r"\bthreadgroup (\w+) (\w+)\[([^\]]+)\];",
        r'static stand_in::Shared<\1, \3> \2("\2");',
        body,
    )
    return (
        f'#include "{HEADER.name}"\n'
        f"{text[: signature.start()]}"
        f"{signature['template'] or ''}void {name}({', '.join(parameters)}) {{\n"
        f"{body}\n"
        "static void one_thread(const stand_in::Launch& launch, "
        "const stand_in::Thread& thread_place) {\n"
        "  (void)launch;\n"
        f"  {call}({', '.join(arguments)});\n"
        "}\n"
        f"{_EXPORTED} void stand_in_run(stand_in::Launch* launch) {{\n"
        "  stand_in::run(*launch, one_thread);\n"
        "}\n"
    ), name


_loaded: dict[str, tuple[ctypes.CDLL, str]] = {}


def load(text: str) -> tuple[ctypes.CDLL, str]:
    """Compile printed Metal source, or find it compiled, and load it.

    Returns:
        The library, and the kernel's name.
    """
    if text not in _loaded:
        source, kernel = harness(text)
        _loaded[text] = (ctypes.CDLL(str(compiled(source))), kernel)
    return _loaded[text]


def compiler() -> str:
    """Find the C++ compiler: $CXX, else g++, c++ or clang++."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    raise StandInError(
        "The kernel tests need a C++ compiler (g++ or clang++), and none was found. Install one "
        "(Debian: apt-get install g++) or set CXX."
    )


def compiled(source: str) -> Path:
    """Compile C++ text to a shared library, kept in the temporary folder by its content's hash."""
    executable = compiler()
    library = _cache_folder() / f"{_key(source, executable)}.so"
    if not library.exists():
        include = f"-I{_header_folder(executable)}"
        _compile(executable, ["-shared", include], source, "kernel.cpp", library)
    return library


def _header_folder(executable: str) -> Path:
    """Make a folder with the stand-in's header, compiled beforehand: g++ then parses it once."""
    folder = _cache_folder() / _key("header", executable)
    folder.mkdir(exist_ok=True)
    header = folder / HEADER.name
    if not header.exists():
        made = header.with_suffix(".h.gch")
        _compile(executable, ["-x", "c++-header"], HEADER.read_text(), HEADER.name, made)
        _write_whole(header, HEADER.read_text())
    return folder


def _compile(executable: str, options: list[str], source: str, name: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        file, made = Path(work) / name, Path(work) / "made"
        file.write_text(source)
        done = subprocess.run(
            [executable, *COMPILER_FLAGS, *options, str(file), "-o", str(made)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise StandInError(f"The kernel does not compile:\n{done.stderr[:4000]}")
        # In one step, so that test processes running side by side never meet half a file.
        os.replace(made, target)


def _write_whole(target: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, target)


def _key(source: str, executable: str) -> str:
    parts = (source, HEADER.read_text(), executable, *COMPILER_FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"mlxspec-metal-stand-in-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise StandInError(f"{folder} is somebody else's. Set TMPDIR to a folder of your own.")
    return folder


_TANH = f"""
{_EXPORTED} void stand_in_tanh(float* values, uint64_t count, int kind) {{
  for (uint64_t i = 0; i < count; i++) {{
    values[i] = kind == 0 ? metal::precise::tanh(values[i])
        : kind == 1 ? float(metal::precise::tanh(half(values[i])))
                    : float(metal::precise::tanh(bfloat(values[i])));
  }}
}}
"""


@cache
def _maths() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled(f'#include "{HEADER.name}"\n{_TANH}')))


def tanh_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Hyperbolic tangent as the stand-in computes it for `dtype`, on values held in float32."""
    result = np.ascontiguousarray(values, np.float32).copy()
    _maths().stand_in_tanh(
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_uint64(result.size),
        ("float32", "float16", "bfloat16").index(dtype),
    )
    return result


def _unsigned(dtype: mx.Dtype) -> type:
    return np.uint32 if dtype.size == 4 else np.uint16


def _mask(dtype: mx.Dtype) -> int:
    return 0xFFFFFFFF if dtype.size == 4 else 0xFFFF


def _to_numpy(array: mx.array) -> np.ndarray:
    bits = array.view(mx.uint16) if array.dtype.size == 2 else array
    # Row after row, as MLX lays a copy out: a broadcast array would keep its stride of 0.
    return np.array(bits).astype(_NUMPY[array.dtype], order="C", copy=True)


def flushes_denormals() -> bool:
    """Whether `StandIn(flush_denormals=True)` does something on this processor: on x86 it does."""
    return platform.machine().lower() in ("x86_64", "amd64")
