// The score parser on raw pointers: an interpreter of the automaton that gatekern/ops/score_grammar.py describes.
#pragma once

#include <cstdint>

namespace gatekern {

struct ParseScoresParams {
  const int64_t* tokens;   // [rows, columns], row_stride
  const uint8_t* codes;    // character classes of all tokens
  const int32_t* offsets;  // [vocab + 1], into codes
  const int32_t* table;    // [states, 64]
  const int64_t* powers;   // 10^0 to 10^18
  const double* floats;    // 10^0 to 10^64
  float* values;           // [rows]
  uint8_t* status;         // [rows]
  int64_t rows, columns, vocab, row_stride;
};

void parse_scores(const ParseScoresParams& params);

}  // namespace gatekern
