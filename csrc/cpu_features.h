// Which instruction sets this build holds and this machine can run.
#pragma once

#include <string>
#include <vector>

#include "label_scores.h"

namespace gatekern {

struct InstructionSet {
  std::string name;
  Dots (*dots_for)(DType dtype);
};

// Slowest first, so the last one is the best. Never empty: `scalar` always runs.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace gatekern
