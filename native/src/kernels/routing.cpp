// See routing.h. Compiled once for each instruction set.
#include "routing.h"

#include <math.h>

#include "rows.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

// Numbers of all experts, in whole vectors.
struct Scores {
  alignas(kLine) float numbers[kMaxExperts];
};

float largest_of(const Scores& scores, int64_t count) {
  float largest = scores.numbers[0];
  for (int64_t i = 1; i < count; ++i) {
    if (scores.numbers[i] > largest) largest = scores.numbers[i];
  }
  return largest;
}

// Writes the places of the `count` largest of `size` numbers, from the largest down.
void find_largest(const float* numbers, int64_t size, int64_t count, int64_t* places) {
  for (int64_t i = 0; i < size; ++i) {
    if (i >= count && !(numbers[i] > numbers[places[count - 1]])) continue;
    int64_t rank = min(i, count - 1);
    for (; rank > 0 && numbers[i] > numbers[places[rank - 1]]; --rank) places[rank] = places[rank - 1];
    places[rank] = i;
  }
}

float sum_in_order(const float* numbers, int64_t count) {
  float sum = numbers[0];
  for (int64_t i = 1; i < count; ++i) sum += numbers[i];
  return sum;
}

// Leaves only the best groups: by softmax those with the best expert, by sigmoid those whose two best sum up to most.
void keep_best_groups(const Routing& routing, Scores& scores) {
  const int64_t size = routing.num_experts / routing.num_groups;
  const int64_t num_best = routing.scoring == Scoring::kSoftmax ? 1 : min(2, size);
  Scores of_groups;
  int64_t best[2], chosen[kMaxExperts];
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    const float* numbers = scores.numbers + group * size;
    find_largest(numbers, size, num_best, best);
    of_groups.numbers[group] = num_best == 1 ? numbers[best[0]] : numbers[best[0]] + numbers[best[1]];
  }
  find_largest(of_groups.numbers, routing.num_groups, routing.num_chosen_groups, chosen);
  bool is_chosen[kMaxExperts] = {};
  for (int64_t i = 0; i < routing.num_chosen_groups; ++i) is_chosen[chosen[i]] = true;
  for (int64_t expert = 0; expert < routing.num_experts; ++expert) {
    if (!is_chosen[expert / size]) scores.numbers[expert] = -INFINITY;
  }
}

// Liu et al. 2023: each of the best is weighed against those that are about as good.
void mix_sparsely(const Routing& routing, const Scores& scores, int64_t* chosen, float* weights) {
  find_largest(scores.numbers, routing.num_experts, routing.num_chosen, chosen);
  bool is_gone[kMaxExperts] = {};
  for (int64_t i = 0; i < routing.num_chosen; ++i) {
    const float top = scores.numbers[chosen[i]];
    float total = 0.0f;
    for (int64_t expert = 0; expert < routing.num_experts; ++expert) {
      const float score = scores.numbers[expert], size = fabsf(score) > top ? fabsf(score) : top;
      if (!is_gone[expert] && !((top - score) / size > 2.0f * routing.jitter)) total += expf(score - top);
    }
    weights[i] = 1.0f / total;
    is_gone[chosen[i]] = true;
  }
}

template <class T>
void route_row(const RoutingCall& call, int64_t row) {
  const Routing& routing = *call.routing;
  const int64_t count = routing.num_experts, num_chosen = routing.num_chosen;
  const T* from = static_cast<const T*>(call.scores) + row * call.score_stride;
  int64_t* chosen = call.chosen + row * num_chosen;
  float* weights = call.weights + row * num_chosen;
  Scores likely;
  for (int64_t i = 0; i < count; i += kLanes) store(likely.numbers + i, load_left(from + i, count - i));
  if (routing.scoring == Scoring::kSparsemixer) return mix_sparsely(routing, likely, chosen, weights);
  const bool is_softmax = routing.scoring == Scoring::kSoftmax;
  const float largest = is_softmax ? largest_of(likely, count) : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32x16 score = load(likely.numbers + i);
    store(likely.numbers + i, is_softmax ? exp(score - largest) : splat(1.0f) / (exp(-score) + 1.0f));
  }
  if (routing.is_plain()) {
    find_largest(likely.numbers, count, num_chosen, chosen);
    for (int64_t i = 0; i < num_chosen; ++i) weights[i] = likely.numbers[chosen[i]];
    const float total = routing.normalize ? sum_in_order(weights, num_chosen) : sum_in_order(likely.numbers, count);
    for (int64_t i = 0; i < num_chosen; ++i) weights[i] /= total;
    return;
  }
  if (is_softmax) {
    const float total = sum_in_order(likely.numbers, count);
    for (int64_t i = 0; i < count; ++i) likely.numbers[i] /= total;
  }
  Scores corrected = likely;
  for (int64_t i = 0; i < count && routing.correction != nullptr; ++i) corrected.numbers[i] += routing.correction[i];
  if (routing.num_groups > 1) keep_best_groups(routing, corrected);
  find_largest(corrected.numbers, count, num_chosen, chosen);
  for (int64_t i = 0; i < num_chosen; ++i) weights[i] = likely.numbers[chosen[i]];
  const float total = routing.normalize ? sum_in_order(weights, num_chosen) : 1.0f;
  for (int64_t i = 0; i < num_chosen; ++i) {
    weights[i] = weights[i] / total * (routing.expert_scales == nullptr ? 1.0f : routing.expert_scales[chosen[i]]);
    weights[i] *= routing.scale;
  }
}

template <class T>
void route_rows(const RoutingCall& call, ThreadPool& pool) {
  // A number takes a few operations, to find its rank.
  for_each_row(pool, call.num_rows, 4 * call.routing->num_experts, [&](int64_t row) { route_row<T>(call, row); });
}

}  // namespace

void route(const RoutingCall& call, ThreadPool& pool) {
  switch (call.score_type) {
    case DType::kBFloat16: return route_rows<bf16>(call, pool);
    case DType::kFloat16: return route_rows<fp16>(call, pool);
    default: return route_rows<float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
