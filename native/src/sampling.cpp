#include "sampling.h"

#include <algorithm>
#include <functional>

namespace quire {

float nth_largest(float* values, int64_t count, int64_t n) {
  std::nth_element(values, values + n - 1, values + count, std::greater<float>());
  return values[n - 1];
}

void sort_tokens(Token* tokens, int64_t count) {
  std::sort(tokens, tokens + count,
            [](const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); });
}

}  // namespace quire
