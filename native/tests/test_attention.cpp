// Ragged steps over a paged cache against plain loops in double, for all instruction sets and types of cache; equal bit for bit
// on any number of threads. Caches and results are of exactly the size needed, for a sanitizer to see a step beyond.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_plan.h"
#include "check.h"

using namespace quire;
using namespace quire::test;

struct Case {
  int64_t num_kv_heads, group, head_dim, block_size;
  int window;
  bool has_key_scores;
  float threshold = 0.0f;  // of the last sequence's tokens for selecting keys; the second one skips some then. 0: neither
  int max_distance = -1;   // of a bias, for whole prompts whose tokens see both sides; negative: neither

  bool is_two_sided() const { return max_distance >= 0; }
};

// Sequences of which the first two begin with the same blocks, or whole prompts that have none in common.
struct Step {
  std::vector<int64_t> num_cached, num_tokens;
  std::vector<int64_t> skipped_start, skipped_end, selecting_end;
  std::vector<int32_t> tables;
  int64_t table_stride = 0, num_blocks = 0, num_rows = 0;

  Step(int64_t block_size, bool is_two_sided) {
    const std::vector<int64_t> lengths = {random_int(130, 300), random_int(130, 300), random_int(1, 70), 1,
                                          is_two_sided ? random_int(1030, 1100) : random_int(1000, 2300)};
    for (const int64_t length : lengths) {
      num_tokens.push_back(is_two_sided ? length : random_int(1, std::min<int64_t>(length, 90)));
      num_cached.push_back(length - num_tokens.back());
      num_rows += num_tokens.back();
      table_stride = std::max(table_stride, (length + block_size - 1) / block_size);
    }
    skipped_start = {0, 10, 0, 0, 0};
    skipped_end = {0, num_cached[1] - 10, 0, 0, 0};
    selecting_end = {0, 0, 0, 0, lengths[4] - 3};
    tables.assign(lengths.size() * table_stride, INT32_MAX);
    for (size_t i = 0; i < lengths.size(); ++i) {
      for (int64_t entry = 0; entry * block_size < lengths[i]; ++entry) {
        const bool is_shared = i == 1 && !is_two_sided && (entry + 1) * block_size <= 128;
        tables[i * table_stride + entry] = static_cast<int32_t>(is_shared ? tables[entry] : num_blocks++);
      }
    }
  }
};

// Of each sequence the tokens from `first_scoring` have key scores: every second sequence has rows, the others have sums.
struct Scores {
  std::vector<int64_t> row_starts, sum_starts;
  std::vector<float> rows;
  std::vector<int64_t> sums;
  std::vector<double> expected_rows, expected_sums;

  explicit Scores(const Step& step) {
    int64_t num_rows = 0, num_sums = 0;
    for (size_t i = 0; i < step.num_tokens.size(); ++i) {
      const int64_t first_scoring = random_int(0, step.num_tokens[i]);
      const int64_t size = round_up(step.num_cached[i] + step.num_tokens[i], kTileTokens);
      for (int64_t token = 0; token < step.num_tokens[i]; ++token) {
        const bool has_row = token >= first_scoring && i % 2 == 0, has_sums = token >= first_scoring && i % 2 != 0;
        row_starts.push_back(has_row ? num_rows : -1);
        sum_starts.push_back(has_sums ? num_sums : -1);
        num_rows += has_row ? size : 0;
      }
      num_sums += i % 2 == 0 ? 0 : size;
    }
    rows.assign(num_rows, std::nanf(""));
    sums.assign(num_sums, -1);
    expected_rows.assign(num_rows, 0.0);
    expected_sums.assign(num_sums, 0.0);
  }

  KeyScores call() {
    return {row_starts.data(),
            sum_starts.data(),
            rows.data(),
            sums.data(),
            static_cast<int64_t>(rows.size()),
            static_cast<int64_t>(sums.size())};
  }

  void expect(size_t row, int64_t key, double weight) {
    if (row_starts[row] >= 0) expected_rows[row_starts[row] + key] += weight;
    if (sum_starts[row] >= 0) expected_sums[sum_starts[row] + key] += weight;
  }

  void check(const char* name) const {
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(std::fabs(rows[i] - expected_rows[i]) < 1e-5, "%s, score %zu: %.9g, not %.9g", name, i, rows[i], expected_rows[i]);
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      const double sum = static_cast<double>(sums[i]) * kScoreUnit;
      CHECK(std::fabs(sum - expected_sums[i]) < 1e-4, "%s, sum %zu: %.9g, not %.9g", name, i, sum, expected_sums[i]);
    }
  }
};

template <>
int8_t quire::test::from_float(float number) {
  return static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, number * 40)));
}

// Two features.
struct Int4Pair {
  uint8_t bits;
};

template <>
Int4Pair quire::test::from_float(float number) {
  const auto rounded = [](float feature) { return static_cast<int>(std::max(-7.0f, std::min(7.0f, feature * 3))) + 8; };
  return {static_cast<uint8_t>(rounded(number) | rounded(-1.5f * number) << 4)};
}

// Keys or values as they are computed with, `scales` being empty or those of vectors: of int4 what the rotation makes of them.
template <class T>
std::vector<double> numbers_of(const std::vector<T>& part, const std::vector<float>& scales, int64_t head_dim) {
  std::vector<double> numbers;
  for (const T& number : part) {
    if constexpr (sizeof(T) == 1 && !std::is_same_v<T, int8_t>) {
      numbers.push_back(number.bits % 16 - 8);
      numbers.push_back(number.bits / 16 - 8);
    } else {
      numbers.push_back(number_of(number));
    }
  }
  for (size_t i = 0; i < numbers.size() && !scales.empty(); ++i) numbers[i] *= scales[i / head_dim];
  if (sizeof(T) != 1 || std::is_same_v<T, int8_t>) return numbers;
  const int64_t width = head_dim & -head_dim;
  std::vector<double> rotated(numbers.size(), 0.0);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t first = i / width * width;
    for (int64_t j = 0; j < width; ++j) {
      const bool is_negative = __builtin_popcountll((i - first) & j) % 2 != 0;
      rotated[i] += (is_negative ? -1.0 : 1.0) / std::sqrt(static_cast<double>(width)) * numbers[first + j];
    }
  }
  return rotated;
}

void choose_keys(const Kernels& kernels, AttentionPlanner& planner, AttentionCall& call, ThreadPool& pool) {
  const KeySelection& selection = planner.selection();
  const int64_t num_heads = call.kv->num_kv_heads * planner.plan().group;
  std::vector<double> masses(num_heads * selection.num_masses);
  Aligned scratch(kernels.mass_scratch(call, selection, pool.num_threads()));
  call.scratch = scratch.data;
  kernels.masses(call, selection, masses.data(), pool);
  planner.choose(masses.data(), num_heads, pool);
}

// Where keys are selected that way, not all are: then only bits are compared.
template <class T>
void check_case(const Case& shape, DType type) {
  const Step step(shape.block_size, shape.is_two_sided());
  const int64_t num_heads = shape.num_kv_heads * shape.group, head_dim = shape.head_dim;
  const int64_t size = type == DType::kInt4 ? head_dim / 2 : head_dim;  // elements of a vector
  const int64_t head_size = shape.block_size * size, block_size = shape.num_kv_heads * head_size;
  std::vector<T> parts[2];
  std::vector<float> scales[2];
  for (int part = 0; part < 2; ++part) {
    for (const float number : random_floats(step.num_blocks * block_size)) parts[part].push_back(from_float<T>(number));
    if (sizeof(T) == 1) scales[part] = std::vector<float>(step.num_blocks * shape.num_kv_heads * shape.block_size, 0.02f);
    for (float& scale : scales[part]) scale *= random_int(1, 3);
  }
  const auto cache_part = [&](int part) {
    return CachePart{parts[part].data(),
                     scales[part].empty() ? nullptr : scales[part].data(),
                     {block_size, head_size, size},
                     {shape.num_kv_heads * shape.block_size, shape.block_size, 1}};
  };
  const KVLayer kv{type, shape.num_kv_heads, head_dim, head_dim, cache_part(0), cache_part(1)};
  const std::vector<float> query = random_floats(step.num_rows * num_heads * head_dim);
  const std::vector<float> sinks = random_floats(num_heads);
  const int64_t max_distance = shape.max_distance;
  const std::vector<float> bias = random_floats(shape.is_two_sided() ? num_heads * (2 * max_distance + 1) : 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  AttentionStep attention_step{step.num_cached.data(), step.num_tokens.data(), static_cast<int64_t>(step.num_tokens.size()),
                               step.tables.data(),     step.table_stride,      static_cast<int32_t>(shape.block_size),
                               shape.is_two_sided()};
  const bool is_sparse = shape.threshold > 0.0f;
  if (is_sparse) {
    attention_step.skipped_start = step.skipped_start.data();
    attention_step.skipped_end = step.skipped_end.data();
    attention_step.selecting_end = step.selecting_end.data();
    attention_step.key_block_size = 128;
    attention_step.stride = 8;
    attention_step.threshold = shape.threshold;
  }
  AttentionPlanner planner(attention_step, shape.window, static_cast<int>(shape.group));

  std::vector<double> expected, numbers[2];
  for (int part = 0; part < 2; ++part) numbers[part] = numbers_of(parts[part], scales[part], head_dim);
  Scores scores(step);
  const auto cached = [&](int part, int64_t sequence, int64_t position, int64_t head, int64_t feature) {
    const int64_t block = step.tables[sequence * step.table_stride + position / shape.block_size];
    const int64_t token = (block * shape.num_kv_heads + head) * shape.block_size + position % shape.block_size;
    return numbers[part][token * head_dim + feature];
  };
  for (size_t sequence = 0, row = 0; sequence < step.num_tokens.size(); ++sequence) {
    for (int64_t i = 0; i < step.num_tokens[sequence]; ++i, ++row) {
      const int64_t position = step.num_cached[sequence] + i;
      const int64_t first = shape.window == 0 ? 0 : std::max<int64_t>(0, position - shape.window + 1);
      const int64_t end = step.num_cached[sequence] + step.num_tokens[sequence];
      const int64_t last_of_window = shape.window == 0 ? end - 1 : std::min(end - 1, position + shape.window - 1);
      const int64_t last = shape.is_two_sided() ? last_of_window : position;
      const auto is_skipped = [&](int64_t key) {
        return is_sparse && key >= step.skipped_start[sequence] && key < step.skipped_end[sequence];
      };
      for (int64_t head = 0; head < num_heads; ++head) {
        std::vector<double> weights;
        double sum = std::exp(static_cast<double>(sinks[head]));
        for (int64_t key = first; key <= last; ++key) {
          double score = 0.0;
          for (int64_t f = 0; f < head_dim; ++f) {
            score += query[(row * num_heads + head) * head_dim + f] * cached(0, sequence, key, head / shape.group, f);
          }
          score *= scale;
          if (shape.is_two_sided()) {
            const int64_t distance = std::max(-max_distance, std::min(key - position, max_distance));
            score += bias[head * (2 * max_distance + 1) + max_distance + distance];
          }
          weights.push_back(is_skipped(key) ? 0.0 : std::exp(score));
          sum += weights.back();
        }
        std::vector<double> total(head_dim, 0.0);
        for (int64_t key = first; key <= last; ++key) {
          const double weight = weights[key - first] / sum;
          for (int64_t f = 0; f < head_dim; ++f) total[f] += weight * cached(1, sequence, key, head / shape.group, f);
          scores.expect(row, key, weight);
        }
        expected.insert(expected.end(), total.begin(), total.end());
      }
    }
  }

  for (const Kernels* kernels : all_kernels()) {
    std::vector<float> first_result, first_rows;
    std::vector<int64_t> first_sums;
    for (const int num_threads : {1, 2, 5}) {
      ThreadPool pool(num_threads);
      std::vector<float> out(query.size(), std::nanf(""));
      const KeyScores key_scores = scores.call();
      AttentionCall call{&planner.plan(),
                         &kv,
                         query.data(),
                         DType::kFloat32,
                         num_heads * head_dim,
                         out.data(),
                         scale,
                         0.0f,
                         sinks.data(),
                         shape.has_key_scores ? &key_scores : nullptr,
                         {shape.is_two_sided() ? bias.data() : nullptr, max_distance},
                         nullptr};
      if (planner.selection().num_blocks > 0) choose_keys(*kernels, planner, call, pool);
      Aligned scratch(kernels->attention_scratch(call, num_threads));
      call.scratch = scratch.data;
      kernels->attention(call, pool);
      const bool has_all_keys = !is_sparse || shape.threshold > 1.0f;
      for (size_t i = 0; i < out.size(); ++i) CHECK(std::isfinite(out[i]), "%s, number %zu", kernels->instruction_set, i);
      for (size_t i = 0; has_all_keys && i < out.size(); ++i) {
        CHECK(std::fabs(out[i] - expected[i]) < 1e-5, "%s, number %zu: %.9g, not %.9g", kernels->instruction_set, i, out[i],
              expected[i]);
      }
      if (shape.has_key_scores && has_all_keys) scores.check(kernels->instruction_set);
      if (num_threads == 1) first_result = out, first_rows = scores.rows, first_sums = scores.sums;
      CHECK(std::memcmp(first_result.data(), out.data(), out.size() * sizeof(float)) == 0, "%s: bits of %d threads",
            kernels->instruction_set, num_threads);
      CHECK(!shape.has_key_scores || (first_rows == scores.rows && first_sums == scores.sums), "%s: key scores of %d threads",
            kernels->instruction_set, num_threads);
    }
  }
}

int main() {
  const Case cases[] = {{1, 2, 16, 16, 0, true},           {2, 3, 48, 7, 70, false},          {1, 1, 128, 128, 0, false},
                        {2, 2, 64, 32, 1100, true},        {2, 2, 32, 16, 0, true, 2.0f},     {1, 3, 48, 7, 0, true, 0.5f},
                        {1, 2, 16, 1, 0, false, 0.0f, 30}, {2, 1, 32, 7, 90, false, 0.0f, 0}, {2, 1, 16, 1, 0, false, 0.0f, 200}};
  for (const Case& shape : cases) {
    check_case<float>(shape, DType::kFloat32);
    check_case<bf16>(shape, DType::kBFloat16);
    check_case<fp16>(shape, DType::kFloat16);
    check_case<int8_t>(shape, DType::kInt8);
    check_case<Int4Pair>(shape, DType::kInt4);
  }
  return 0;
}
