"""Build of the optional C++ extension `gatekern._native`; everything else is declared in pyproject.toml.

The extension needs a C++17 compiler and pybind11, never torch. Where either is missing the package installs without it
and runs on PyTorch. Code for wide instruction sets is compiled file by file with its own flags and chosen at run time,
so a binary built on one machine runs on every other.
"""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

COMMON_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"]
HEADERS = ["csrc/cpu_features.h", "csrc/dots.h", "csrc/label_scores.h", "csrc/parse_scores.h"]
BASELINE = [
    "csrc/binding.cpp",
    "csrc/cpu_features.cpp",
    "csrc/label_scores.cpp",
    "csrc/label_scores_scalar.cpp",
    "csrc/parse_scores.cpp",
]
# source -> (macro that tells cpu_features.cpp the code is there, flags of that file alone)
X86_64 = {
    "csrc/label_scores_avx2.cpp": ("GATEKERN_AVX2", ["-mavx2", "-mfma", "-mf16c"]),
    "csrc/label_scores_avx512.cpp": (
        "GATEKERN_AVX512_BF16",
        ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"],
    ),
}


class OptionalBuildExt(build_ext):
    """Compile each instruction set with its own flags; turn any failure into one warning."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11

            ext.include_dirs.append(pybind11.get_include())
            # Is there a compiler at all? One plain file, so that its absence is one message.
            self.compiler.compile(["csrc/label_scores_scalar.cpp"], self.build_temp, extra_postargs=COMMON_FLAGS)
            if platform.machine().lower() in ("x86_64", "amd64"):
                self._compile_instruction_sets(ext)
            super().build_extension(ext)
        except Exception as error:  # whatever the tool chain says, the package must still install
            print(
                f"warning: gatekern: the C++ extension was not built ({type(error).__name__}: {error}). "
                "The package works without it: its operators on the CPU will run on PyTorch."
            )

    def _compile_instruction_sets(self, ext: Extension) -> None:
        for source, (macro, flags) in X86_64.items():
            try:
                objects = self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=COMMON_FLAGS + flags,
                    depends=HEADERS,
                )
            except CompileError:  # a compiler too old for these flags still builds the rest
                print(f"warning: gatekern: {source} was left out: this compiler does not take {' '.join(flags)}")
                continue
            ext.extra_objects.extend(objects)
            ext.define_macros.append((macro, None))


setup(
    ext_modules=[
        Extension(
            "gatekern._native",
            sources=BASELINE,
            include_dirs=["csrc"],
            depends=[*HEADERS, *X86_64],
            extra_compile_args=COMMON_FLAGS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": OptionalBuildExt},
)
