// The loop over the hidden width, written once for every instruction set.
//
// A unit includes this file and instantiates `dots<Vec>` with a policy `Vec` of its own unnamed namespace. That gives each
// instantiation internal linkage, so the linker can never replace the baseline's copy by one compiled for a wider CPU.
#pragma once

#include <cstdint>

namespace gatekern {
namespace {

// K labels at a time, to use each hidden vector K times. Two partial sums per label hide the latency of the multiply-add.
// The order of additions is the same for every K: a label's logit does not depend on how many others are asked for.
template <class Vec, int K>
void dot_block(const typename Vec::Element* hidden, const void* const* weight_rows, int64_t width, float* out) {
  using Element = typename Vec::Element;
  const Element* weights[K];
  typename Vec::Sum even[K];
  typename Vec::Sum odd[K];
  for (int k = 0; k < K; ++k) {
    weights[k] = static_cast<const Element*>(weight_rows[k]);
    even[k] = Vec::zero();
    odd[k] = Vec::zero();
  }
  int64_t i = 0;
  for (; i + 2 * Vec::kLanes <= width; i += 2 * Vec::kLanes) {
    const auto first = Vec::load(hidden + i);
    const auto second = Vec::load(hidden + i + Vec::kLanes);
    for (int k = 0; k < K; ++k) {
      even[k] = Vec::multiply_add(first, Vec::load(weights[k] + i), even[k]);
      odd[k] = Vec::multiply_add(second, Vec::load(weights[k] + i + Vec::kLanes), odd[k]);
    }
  }
  for (; i < width; i += Vec::kLanes) {
    const int count = static_cast<int>(width - i < Vec::kLanes ? width - i : Vec::kLanes);
    const auto last = Vec::load_first(hidden + i, count);
    for (int k = 0; k < K; ++k) even[k] = Vec::multiply_add(last, Vec::load_first(weights[k] + i, count), even[k]);
  }
  for (int k = 0; k < K; ++k) out[k] = Vec::reduce(Vec::add(even[k], odd[k]));
}

template <class Vec>
void dots(const void* hidden_row, const void* const* weight_rows, int64_t count, int64_t width, float* out) {
  const auto* hidden = static_cast<const typename Vec::Element*>(hidden_row);
  for (; count >= 4; count -= 4, weight_rows += 4, out += 4) dot_block<Vec, 4>(hidden, weight_rows, width, out);
  switch (count) {
    case 3: return dot_block<Vec, 3>(hidden, weight_rows, width, out);
    case 2: return dot_block<Vec, 2>(hidden, weight_rows, width, out);
    case 1: return dot_block<Vec, 1>(hidden, weight_rows, width, out);
  }
}

}  // namespace
}  // namespace gatekern
