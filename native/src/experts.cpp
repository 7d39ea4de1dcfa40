#include "experts.h"

#include <algorithm>

namespace quire {
namespace {

// Of one expert, multiplied with a panel together: as many as stay in the second-level cache beside it.
constexpr int64_t kBlockRows = 64;

// Where the parts of the scratch memory of a call begin, in bytes.
struct Scratch {
  int64_t ends = 0;      // int64 [num_experts]
  int64_t places;        // int64 [pairs]
  int64_t blocks;        // ExpertRows::Block [max_blocks]
  int64_t inner;         // [pairs, inner_stride] in the rows' type
  int64_t inner_stride;  // of numbers
  int64_t results;       // float32 [pairs, hidden]
  int64_t products;      // of both products
  int64_t total;

  explicit Scratch(const ExpertsCall& call) {
    const int64_t pairs = call.num_rows * call.num_chosen;
    const int64_t max_blocks = std::min(call.num_experts, pairs) + pairs / kBlockRows;
    places = round_up(call.num_experts * 8, kLine);
    blocks = places + round_up(pairs * 8, kLine);
    inner = blocks + round_up(max_blocks * sizeof(ExpertRows::Block), kLine);
    inner_stride = call.gate_up->out_features / 2;
    results = inner + round_up(pairs * inner_stride * (call.row_type == DType::kFloat32 ? 4 : 2), kLine);
    products = results + round_up(pairs * call.down->out_features * 4, kLine);
    total = products + std::max(LinearScratch(*call.gate_up, pairs).total, LinearScratch(*call.down, pairs).total);
  }
};

// Says for each pair of a row and an expert where it comes among all pairs, sorted by expert, and cuts the pairs of each expert
// into blocks. Returns the number of blocks.
int64_t sort_pairs(const ExpertsCall& call, int64_t* ends, int64_t* places, ExpertRows::Block* blocks) {
  const int64_t pairs = call.num_rows * call.num_chosen;
  std::fill_n(ends, call.num_experts, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) ++ends[call.chosen[pair]];
  int64_t num_blocks = 0, next = 0;
  for (int64_t expert = 0; expert < call.num_experts; ++expert) {
    const int64_t end = next + ends[expert];
    ends[expert] = next;  // where the next of its pairs goes
    for (; next < end; next = blocks[num_blocks++].last_row) {
      blocks[num_blocks] = {expert, next, std::min(next + kBlockRows, end)};
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair) places[pair] = ends[call.chosen[pair]]++;
  return num_blocks;
}

}  // namespace

int64_t experts_scratch(const ExpertsCall& call) { return Scratch(call).total; }

void experts(const ExpertsCall& call, const Kernels& kernels, ThreadPool& pool) {
  const Scratch scratch(call);
  const auto at = [&](int64_t place) { return static_cast<void*>(call.scratch + place); };
  int64_t* places = static_cast<int64_t*>(at(scratch.places));
  auto* blocks = static_cast<ExpertRows::Block*>(at(scratch.blocks));
  const int64_t num_blocks = sort_pairs(call, static_cast<int64_t*>(at(scratch.ends)), places, blocks);
  const int64_t pairs = call.num_rows * call.num_chosen, hidden = call.down->out_features;

  const ExpertRows of_gate_up = {call.gate_up_panels, blocks, num_blocks, places, call.num_chosen};
  LinearCall product = {
      call.gate_up,      call.rows,         call.row_type, call.row_stride,      pairs,
      call.gate_up_bias, at(scratch.inner), call.row_type, scratch.inner_stride, call.scratch + scratch.products,
      &of_gate_up,       &call.activation};
  kernels.linear(product, pool);

  const ExpertRows of_down = {call.down_panels, blocks, num_blocks, nullptr, 1};
  product = {call.down,
             at(scratch.inner),
             call.row_type,
             scratch.inner_stride,
             pairs,
             call.down_bias,
             at(scratch.results),
             DType::kFloat32,
             hidden,
             call.scratch + scratch.products,
             &of_down};
  kernels.linear(product, pool);

  kernels.combine({static_cast<const float*>(at(scratch.results)), places, call.weights, call.num_chosen, call.out, call.out_type,
                   call.num_rows, hidden, call.out_stride},
                  pool);
}

}  // namespace quire
