// One table look-up per character; where the action is not empty, a few operations on the registers.
#include "parse_scores.h"

#include <algorithm>
#include <limits>

namespace gatekern {
namespace {

// As in gatekern/ops/score_grammar.py, which says what they mean.
constexpr int kColumns = 64, kCut = 56;
constexpr int32_t kDone = 1;
constexpr int kStateShift = 12;
constexpr int32_t kStrength = 0b11, kReading = 0b111 << 2, kSave = 1 << 5, kClear = 1 << 6, kPush = 0b111 << 7;
constexpr int32_t kPercent = 1 << 10, kForget = 1 << 11, kAction = (1 << kStateShift) - 1;
constexpr int kLabelled = 3;
constexpr int kPushFraction = 2, kPushExponent = 3, kPushNegativeExponent = 4;
constexpr int kCount = 6, kRatio = 7;  // readings; 1 to 5 are statuses
enum Status { kOk = 0, kNoNumber = 1, kAmbiguous = 2, kOutOfRange = 3, kMalformed = 4, kIncomplete = 5 };
constexpr int64_t kMaxDigits = 17, kMaxExponent = 1000000000, kMaxPlaces = 64;

// mantissa / 10^places, without trailing zeros in the mantissa; zero is 0 / 10^0.
struct Decimal {
  int64_t mantissa = 0, places = 0;
  bool operator==(const Decimal& other) const { return mantissa == other.mantissa && places == other.places; }
};

struct Number {
  int64_t mantissa = 0, digits = 0, zeros = 0, decimals = 0, exponent = 0;

  Decimal value() const { return mantissa == 0 ? Decimal{} : Decimal{mantissa, decimals - zeros - exponent}; }

  void push(int digit, int kind, const int64_t* powers) {
    if (kind >= kPushExponent) {
      exponent = exponent * 10 + (kind == kPushExponent ? digit : -digit);
      exponent = std::clamp(exponent, -kMaxExponent, kMaxExponent);
      return;
    }
    if (kind == kPushFraction) ++decimals;
    zeros = mantissa != 0 || digit != 0 ? zeros + 1 : 0;
    if (digit == 0) return;
    const bool fits = digits + zeros <= kMaxDigits;
    const int64_t room = fits ? zeros : kMaxDigits + 1 - digits;
    if (room == 0) return;
    mantissa = mantissa * powers[room] + (fits ? digit : 1);
    digits += room;
    zeros -= room;
  }
};

struct Best {
  int strength = 0, status = kNoNumber;
  Decimal value;

  void add(int other_strength, int other_status, Decimal other) {
    if (other_strength != kLabelled && (other_status == kOutOfRange || other_status == kMalformed)) {
      if (strength == 0 && status != kOutOfRange) status = other_status;
    } else if (other_strength > strength || other_status == kNoNumber || other_status == kIncomplete) {
      *this = {other_strength, other_status, other};  // the two statuses are of the reply's end, and last
    } else if (other_strength == strength && !(other_status == status && (status != kOk || other == value))) {
      status = kAmbiguous;
    }
  }
};

// x / 5 is 2 x / 10, whose mantissa may end in a new zero.
Decimal over_five(Decimal x) {
  x = {x.mantissa * 2, x.places + 1};
  if (x.mantissa % 10 == 0) x = {x.mantissa / 10, x.places - 1};
  return x;
}

void commit(int strength, int reading, Decimal first, Decimal number, const int64_t* powers, Best& best) {
  bool malformed = false;
  if (reading == kRatio) {
    const Decimal denominator = number;
    const bool five = denominator == Decimal{5, 0};
    malformed = !five && !(denominator.mantissa == 1 && denominator.places <= 0 && denominator.places >= -2);
    number = five ? over_five(first) : Decimal{first.mantissa, first.places - denominator.places};
    if (number.mantissa == 0) number.places = 0;
  }
  const bool inside = number.places >= 0 && number.mantissa <= powers[std::min<int64_t>(number.places, 18)];
  int status = inside ? kOk : kOutOfRange;
  if (malformed || (reading == kCount && inside)) status = kMalformed;
  if (reading >= 1 && reading < kCount) status = reading;
  best.add(strength, status, number);
}

void parse_row(const ParseScoresParams& p, const int64_t* tokens, float& value, uint8_t& status) {
  int32_t state = 0;
  Number number;
  Decimal first;
  Best best;
  const auto read = [&](int code) {
    const int32_t word = p.table[state * kColumns + code];
    state = word >> kStateShift;
    if ((word & kAction) == 0) return;
    if (word & kForget) best = {};
    if (word & kStrength) commit(word & kStrength, (word & kReading) >> 2, first, number.value(), p.powers, best);
    if (word & kSave) first = number.value();
    if (word & kClear) number = {};
    if (word & kPush) number.push(code, (word & kPush) >> 7, p.powers);
    if (word & kPercent) number.decimals += 2;
  };
  for (int64_t column = 0; column < p.columns && state != kDone; ++column) {
    const int64_t token = tokens[column];
    if (token < 0 || token >= p.vocab) break;
    for (int64_t i = p.offsets[token]; i < p.offsets[token + 1] && state != kDone; ++i) read(p.codes[i] % kColumns);
  }
  if (state != kDone) read(kCut);
  status = static_cast<uint8_t>(best.status);
  value = std::numeric_limits<float>::quiet_NaN();
  if (best.status == kOk) {
    value = static_cast<float>(static_cast<double>(best.value.mantissa) /
                               p.floats[std::min(best.value.places, kMaxPlaces)]);
  }
}

}  // namespace

void parse_scores(const ParseScoresParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    parse_row(p, p.tokens + row * p.row_stride, p.values[row], p.status[row]);
  }
}

}  // namespace gatekern
