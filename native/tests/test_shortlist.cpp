// Shortlists in memory of exact sizes: results are those of all products or missing, and the largest are there.
#include "shortlist.h"

#include <algorithm>

#include "check.h"

using namespace quire;
using namespace quire::test;

void check_case(const Kernels& kernels, ThreadPool& pool, int64_t out_features, int64_t in_features, int64_t num_rows,
                int64_t num_largest) {
  const std::vector<bf16> numbers = to_bf16(random_floats(out_features * in_features, 0.1f));
  const std::vector<bf16> rows = to_bf16(random_floats(num_rows * in_features));
  const WeightSource source = {numbers.data(), DType::kBFloat16, out_features, nullptr, nullptr};
  PackedWeight exact = {WeightFormat::kBFloat16, out_features, in_features, 0, nullptr};
  PackedWeight screen = {WeightFormat::kInt8, out_features, in_features, 0, nullptr};
  const Aligned panels(exact.bytes()), screen_panels(screen.bytes());
  std::vector<float> norms(2 * screen.num_panels() * kPanelColumns);
  PackCall pack = {&exact, panels.data, &source, 1, nullptr};
  const Aligned pack_memory(kernels.pack_scratch(pack, pool.num_threads()));
  pack.scratch = pack_memory.data;
  kernels.pack(pack, pool);
  pack.weight = &screen;
  pack.panels = screen_panels.data;
  pack.norms = norms.data();
  kernels.pack(pack, pool);
  exact.panels = panels.data;
  screen.panels = screen_panels.data;

  std::vector<float> every(num_rows * out_features), found(num_rows * out_features);
  const Aligned linear_memory(LinearScratch(exact, num_rows).total);
  const Aligned memory(ShortlistScratch(exact, screen, num_rows).total);
  LinearCall call = {&exact,  rows.data(),  DType::kBFloat16, in_features,  num_rows,
                     nullptr, every.data(), DType::kFloat32,  out_features, linear_memory.data};
  kernels.linear(call, pool);
  call.out = found.data();
  call.scratch = nullptr;
  const bool is_short = kernels.shortlist({call, &screen, norms.data(), num_largest, memory.data}, pool);
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* all = every.data() + row * out_features;
    std::vector<float> sorted(all, all + out_features);
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    const float least = sorted[std::min(num_largest, out_features) - 1];
    for (int64_t column = 0; column < out_features; ++column) {
      const float result = found[row * out_features + column];
      const bool is_missing = std::isinf(result);
      CHECK(!is_missing || (is_short && all[column] < least), "%s: %lld of row %lld is missing", kernels.instruction_set,
            static_cast<long long>(column), static_cast<long long>(row));
      CHECK(is_missing || result == all[column], "%s: %g is %g", kernels.instruction_set, all[column], result);
    }
  }
}

int main() {
  ThreadPool pool(3);
  for (const Kernels* kernels : all_kernels()) {
    for (int64_t num_rows = 1; num_rows <= kMaxShortlistRows; ++num_rows) {
      for (const int64_t out_features : {1, 32, 45, 1000, 4000}) {
        for (const int64_t in_features : {1, 18, 64, 250}) {
          check_case(*kernels, pool, out_features, in_features, num_rows, random_int(1, 40));
        }
      }
    }
  }
}
