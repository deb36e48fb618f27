// The label-score operator on raw pointers: everything that the C++ units share.
//
// Nothing here knows torch. Sizes and strides are int64 and counted in elements; the last dimension is contiguous.
#pragma once

#include <cstdint>

namespace gatekern {

// Raised whenever the meaning of an argument changes, so that Python can refuse a library built from other sources.
constexpr int kInterfaceVersion = 2;

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct LabelScoresParams {
  const void* hidden;  // [rows, width], dtype
  const void* weight;  // [vocab, width], dtype
  const void* bias;    // [vocab], bias_dtype, or null
  DType dtype;
  DType bias_dtype;
  const int64_t* label_ids;      // [labels]
  const int64_t* group_offsets;  // [groups + 1]
  float* logits;                 // [rows, groups], contiguous
  float* score;                  // [rows]
  int64_t rows, width, vocab, labels, groups;
  int64_t hidden_stride, weight_stride;
  float scale;
  float softcap;  // 0: no cap
};

// Dot products of one hidden row with `count` weight rows, accumulated in float32 in an order that depends on `width` alone.
using Dots = void (*)(const void* hidden, const void* const* weight_rows, int64_t count, int64_t width, float* out);

// One per instruction set. These units hold dot products and nothing else: code with branches or library calls is compiled
// once, for the baseline, so a wide instruction can only sit behind the run-time check that guards these functions.
namespace scalar {
Dots dots_for(DType dtype);
}
namespace avx2 {
Dots dots_for(DType dtype);
}
namespace avx512_bf16 {
Dots dots_for(DType dtype);
}

float to_float(const void* values, DType dtype, int64_t index);

void label_scores(const LabelScoresParams& params, Dots dots);

}  // namespace gatekern
