// Dot products for AVX-512 with the bf16 extension: sixteen float32 lanes, and for bf16 inputs vdpbf16ps, which multiplies
// 32 pairs at once. It sums each pair into a float32 lane and flushes subnormal inputs to zero.
#include <immintrin.h>

#include <cstdint>

#include "dots.h"
#include "label_scores.h"

namespace gatekern {
namespace {

struct Lanes {
  using Sum = __m512;
  static constexpr int kLanes = 16;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
  static float reduce(__m512 sum) {
    float lane[16];
    _mm512_storeu_ps(lane, sum);
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }
  static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
};

struct Float32 : Lanes {
  using Element = float;
  static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  static __m512 load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
};

struct BFloat16 : Lanes {
  using Element = uint16_t;
  static constexpr int kLanes = 32;
  static __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh load_first(const uint16_t* p, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(0xffffffffu >> (32 - count), p);
  }
  static __m512 multiply_add(__m512bh a, __m512bh b, __m512 sum) { return _mm512_dpbf16_ps(sum, a, b); }
};

struct Float16 : Lanes {
  using Element = uint16_t;
  static __m512 load(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512 load_first(const uint16_t* p, int count) {
    return widen(_mm256_maskz_loadu_epi16(first(count), p));
  }
  // The unmasked form makes gcc 12 warn about an uninitialised register inside its own header.
  static __m512 widen(__m256i halves) { return _mm512_maskz_cvtph_ps(0xffff, halves); }
};

}  // namespace

namespace avx512_bf16 {

Dots dots_for(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return dots<BFloat16>;
    case DType::kFloat16: return dots<Float16>;
    default: return dots<Float32>;
  }
}

}  // namespace avx512_bf16
}  // namespace gatekern
