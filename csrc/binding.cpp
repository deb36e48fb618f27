// The Python module gatekern._native. Addresses arrive as integers, so building needs no torch and one build serves every
// torch; gatekern/ops/native checks shapes and dtypes before it calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_features.h"
#include "label_scores.h"
#include "parse_scores.h"

namespace py = pybind11;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

const gatekern::InstructionSet& instruction_set(const std::string& name) {
  for (const auto& set : gatekern::instruction_sets()) {
    if (set.name == name) return set;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available here");
}

std::vector<std::string> instruction_set_names() {
  std::vector<std::string> names;
  for (const auto& set : gatekern::instruction_sets()) names.push_back(set.name);
  return names;
}

void label_scores(const std::string& isa, uintptr_t hidden, uintptr_t weight, uintptr_t bias, int dtype, int bias_dtype,
                  uintptr_t label_ids, uintptr_t group_offsets, uintptr_t logits, uintptr_t score, int64_t rows,
                  int64_t width, int64_t vocab, int64_t labels, int64_t groups, int64_t hidden_stride,
                  int64_t weight_stride, float scale, float softcap) {
  gatekern::LabelScoresParams params;
  params.hidden = pointer<const void>(hidden);
  params.weight = pointer<const void>(weight);
  params.bias = pointer<const void>(bias);
  params.dtype = static_cast<gatekern::DType>(dtype);
  params.bias_dtype = static_cast<gatekern::DType>(bias_dtype);
  params.label_ids = pointer<const int64_t>(label_ids);
  params.group_offsets = pointer<const int64_t>(group_offsets);
  params.logits = pointer<float>(logits);
  params.score = pointer<float>(score);
  params.rows = rows;
  params.width = width;
  params.vocab = vocab;
  params.labels = labels;
  params.groups = groups;
  params.hidden_stride = hidden_stride;
  params.weight_stride = weight_stride;
  params.scale = scale;
  params.softcap = softcap;
  const gatekern::Dots dots = instruction_set(isa).dots_for(params.dtype);
  py::gil_scoped_release unlocked;
  gatekern::label_scores(params, dots);
}

void parse_scores(uintptr_t tokens, uintptr_t codes, uintptr_t offsets, uintptr_t table, uintptr_t powers,
                  uintptr_t floats, uintptr_t values, uintptr_t status, int64_t rows, int64_t columns, int64_t vocab,
                  int64_t row_stride) {
  gatekern::ParseScoresParams params;
  params.tokens = pointer<const int64_t>(tokens);
  params.codes = pointer<const uint8_t>(codes);
  params.offsets = pointer<const int32_t>(offsets);
  params.table = pointer<const int32_t>(table);
  params.powers = pointer<const int64_t>(powers);
  params.floats = pointer<const double>(floats);
  params.values = pointer<float>(values);
  params.status = pointer<uint8_t>(status);
  params.rows = rows;
  params.columns = columns;
  params.vocab = vocab;
  params.row_stride = row_stride;
  py::gil_scoped_release unlocked;
  gatekern::parse_scores(params);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "C++ kernels of gatekern on raw pointers.";
  module.attr("interface_version") = gatekern::kInterfaceVersion;
  module.def("instruction_sets", &instruction_set_names, "Names that can run here, slowest first.");
  module.def("label_scores", &label_scores, py::kw_only(), py::arg("isa"), py::arg("hidden"), py::arg("weight"),
             py::arg("bias"), py::arg("dtype"), py::arg("bias_dtype"), py::arg("label_ids"), py::arg("group_offsets"),
             py::arg("logits"), py::arg("score"), py::arg("rows"), py::arg("width"), py::arg("vocab"),
             py::arg("labels"), py::arg("groups"), py::arg("hidden_stride"), py::arg("weight_stride"),
             py::arg("scale"), py::arg("softcap"));
  module.def("parse_scores", &parse_scores, py::kw_only(), py::arg("tokens"), py::arg("codes"), py::arg("offsets"),
             py::arg("table"), py::arg("powers"), py::arg("floats"), py::arg("values"), py::arg("status"),
             py::arg("rows"), py::arg("columns"), py::arg("vocab"), py::arg("row_stride"));
}
