// The operator around the dot products: bias, scale, soft-cap, log-sum-exp per group, softmax over groups.
#include "label_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace gatekern {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// exp(-inf - -inf) is NaN: shift by 0 when the maximum is infinite. A NaN among the values still reaches the sum.
float finite_shift(float maximum) { return std::isinf(maximum) ? 0.0f : maximum; }

float log_sum_exp(const float* values, int64_t begin, int64_t end) {
  float maximum = -kInfinity;
  for (int64_t i = begin; i < end; ++i) maximum = std::max(maximum, values[i]);
  const float shift = finite_shift(maximum);
  float sum = 0.0f;
  for (int64_t i = begin; i < end; ++i) sum += std::exp(values[i] - shift);
  return shift + std::log(sum);
}

// softmax(values)[0]. Without the guard on purpose: no finite maximum means no evidence, and the answer is NaN.
float first_probability(const float* values, int64_t count) {
  float maximum = -kInfinity;
  for (int64_t i = 0; i < count; ++i) maximum = std::max(maximum, values[i]);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(values[i] - maximum);
  return std::exp(values[0] - maximum) / sum;
}

}  // namespace

void label_scores(const LabelScoresParams& p, Dots dots) {
  const char* hidden = static_cast<const char*>(p.hidden);
  const char* weight = static_cast<const char*>(p.weight);
  const int64_t bytes = element_size(p.dtype);

  std::vector<const void*> weight_rows(p.labels);
  std::vector<float> bias(p.labels);
  for (int64_t l = 0; l < p.labels; ++l) {
    const int64_t id = p.label_ids[l];
    const bool valid = id >= 0 && id < p.vocab;
    // An id outside the vocabulary reads row 0 and turns to NaN: visible, and never an access outside the weight.
    weight_rows[l] = weight + (valid ? id : 0) * p.weight_stride * bytes;
    bias[l] = !valid ? std::numeric_limits<float>::quiet_NaN() : p.bias ? to_float(p.bias, p.bias_dtype, id) : 0.0f;
  }

  std::vector<float> z(p.labels);
  for (int64_t row = 0; row < p.rows; ++row) {
    dots(hidden + row * p.hidden_stride * bytes, weight_rows.data(), p.labels, p.width, z.data());
    for (int64_t l = 0; l < p.labels; ++l) {
      z[l] = p.scale * (z[l] + bias[l]);
      if (p.softcap != 0.0f) z[l] = p.softcap * std::tanh(z[l] / p.softcap);
    }
    float* logits = p.logits + row * p.groups;
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t begin = std::max<int64_t>(p.group_offsets[g], 0);
      const int64_t end = std::min(p.group_offsets[g + 1], p.labels);
      logits[g] = log_sum_exp(z.data(), begin, end);
    }
    p.score[row] = first_probability(logits, p.groups);
  }
}

}  // namespace gatekern
