// Dot products for AVX2 + FMA + F16C: eight float32 lanes; 16-bit inputs are widened on load.
#include <immintrin.h>

#include <cstdint>

#include "dots.h"
#include "label_scores.h"

namespace gatekern {
namespace {

struct Lanes {
  using Sum = __m256;
  static constexpr int kLanes = 8;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float reduce(__m256 sum) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
};

// AVX2 has no masked load for 16-bit elements; a zero-padded copy keeps the tail inside the row.
template <class Vec>
__m256 load_padded(const typename Vec::Element* p, int count) {
  typename Vec::Element padded[Lanes::kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return Vec::load(padded);
}

struct Float32 : Lanes {
  using Element = float;
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static __m256 load_first(const float* p, int count) { return load_padded<Float32>(p, count); }
};

struct BFloat16 : Lanes {
  using Element = uint16_t;
  static __m256 load(const uint16_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static __m256 load_first(const uint16_t* p, int count) { return load_padded<BFloat16>(p, count); }
};

struct Float16 : Lanes {
  using Element = uint16_t;
  static __m256 load(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256 load_first(const uint16_t* p, int count) { return load_padded<Float16>(p, count); }
};

}  // namespace

namespace avx2 {

Dots dots_for(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return dots<BFloat16>;
    case DType::kFloat16: return dots<Float16>;
    default: return dots<Float32>;
  }
}

}  // namespace avx2
}  // namespace gatekern
