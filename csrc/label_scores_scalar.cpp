// Portable dot products: plain C++, eight lanes so that a compiler can use whatever its baseline offers (SSE2, NEON).
#include <cstdint>
#include <cstring>

#include "dots.h"
#include "label_scores.h"

namespace gatekern {
namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float to_float(float value) { return value; }

struct BFloat16 {
  uint16_t bits;
};
float to_float(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

struct Float16 {
  uint16_t bits;
};
float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return from_bits(sign | 0x7f800000u | magnitude);  // infinity and NaN
  // The exponent bias differs by 112; a multiplication by 2^112 corrects it for normal and subnormal values alike.
  return from_bits(sign | 0x3f800000u) * (from_bits(magnitude) * 0x1p112f);
}

template <class T>
struct Vec {
  using Element = T;
  static constexpr int kLanes = 8;
  struct Sum {
    float lane[kLanes];
  };

  static Sum zero() { return Sum{}; }
  static Sum load(const T* p) {
    Sum out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = to_float(p[i]);
    return out;
  }
  static Sum load_first(const T* p, int count) {
    Sum out{};
    for (int i = 0; i < count; ++i) out.lane[i] = to_float(p[i]);
    return out;
  }
  static Sum multiply_add(const Sum& a, const Sum& b, Sum sum) {
    for (int i = 0; i < kLanes; ++i) sum.lane[i] += a.lane[i] * b.lane[i];
    return sum;
  }
  static Sum add(Sum a, const Sum& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static float reduce(const Sum& s) {
    return ((s.lane[0] + s.lane[4]) + (s.lane[2] + s.lane[6])) + ((s.lane[1] + s.lane[5]) + (s.lane[3] + s.lane[7]));
  }
};

}  // namespace

float to_float(const void* values, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(values)[index]);
    case DType::kFloat16: return to_float(static_cast<const Float16*>(values)[index]);
    default: return static_cast<const float*>(values)[index];
  }
}

namespace scalar {

Dots dots_for(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return dots<Vec<BFloat16>>;
    case DType::kFloat16: return dots<Vec<Float16>>;
    default: return dots<Vec<float>>;
  }
}

}  // namespace scalar
}  // namespace gatekern
