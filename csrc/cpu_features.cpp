#include "cpu_features.h"

namespace gatekern {

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> out{{"scalar", scalar::dots_for}};
#ifdef GATEKERN_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      out.push_back({"avx2", avx2::dots_for});
    }
#endif
#ifdef GATEKERN_AVX512_BF16
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16")) {
      out.push_back({"avx512_bf16", avx512_bf16::dots_for});
    }
#endif
    return out;
  }();
  return sets;
}

}  // namespace gatekern
