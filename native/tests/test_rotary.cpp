// From the fused projection to queries and cache, against plain loops in double, for all types of rows and caches and all
// instruction sets. Memory is of exactly the size needed, and of the cache nothing but the tokens' places changes.
#include "elementwise.h"

#include <algorithm>
#include <numeric>

#include "check.h"

using namespace quire;
using namespace quire::test;

struct Case {
  int64_t num_rows, num_heads, num_kv_heads, head_dim, half;
  bool has_norms;
  bool has_values = true;  // beside the keys
};

constexpr int64_t kBlockSize = 4;
constexpr float kEps = 1e-6f;

// Keys or values [blocks, heads, block_size, head_dim] and their scales [blocks, heads, block_size], poisoned.
template <class C>
struct Cache {
  std::vector<C> numbers;
  std::vector<float> scales;
  CachePart part;

  Cache(int64_t num_blocks, const Case& shape)
      : numbers(num_blocks * shape.num_kv_heads * kBlockSize * shape.head_dim), scales(numbers.size() / shape.head_dim, 99.0f) {
    std::memset(static_cast<void*>(numbers.data()), 99, numbers.size() * sizeof(C));
    const int64_t block = shape.num_kv_heads * kBlockSize;
    part = {numbers.data(),
            sizeof(C) == 1 ? scales.data() : nullptr,
            {block * shape.head_dim, kBlockSize * shape.head_dim, shape.head_dim},
            {block, kBlockSize, 1}};
  }
};

// What normalizing and rotating makes of the heads from `first` on, as it is in double.
template <class T>
std::vector<double> rotated(const std::vector<T>& row, int64_t first, int64_t count, const Case& shape, const float* norm,
                            const float* cos, const float* sin) {
  std::vector<double> result;
  for (int64_t head = 0; head < count; ++head) {
    std::vector<double> numbers;
    for (int64_t i = 0; i < shape.head_dim; ++i) numbers.push_back(number_of(row[(first + head) * shape.head_dim + i]));
    if (norm != nullptr) {
      double squares = 0.0;
      for (const double number : numbers) squares += number * number;
      for (int64_t i = 0; i < shape.head_dim; ++i) numbers[i] *= norm[i] / std::sqrt(squares / shape.head_dim + kEps);
    }
    std::vector<double> turned = numbers;
    for (int64_t i = 0; i < shape.half; ++i) {
      turned[i] = numbers[i] * cos[i] - numbers[shape.half + i] * sin[i];
      turned[shape.half + i] = numbers[shape.half + i] * cos[i] + numbers[i] * sin[i];
    }
    result.insert(result.end(), turned.begin(), turned.end());
  }
  return result;
}

// The cache's numbers of one head of one token against the row's, `from`.
template <class T, class C>
void check_written(const Cache<C>& cache, int64_t place, const T* from, int64_t head_dim) {
  double limit = 0.0;
  for (int64_t i = 0; i < head_dim; ++i) limit = std::max(limit, std::fabs(number_of(from[i])));
  const float scale = cache.scales[place];
  if (sizeof(C) == 1) CHECK(std::fabs(scale - limit / 127.0) <= 1e-6 * limit, "scale %.9g of %.9g", scale, limit);
  for (int64_t i = 0; i < head_dim; ++i) {
    const double number = number_of(cache.numbers[place * head_dim + i]), exact = number_of(from[i]);
    if constexpr (sizeof(C) == 1) {
      CHECK(std::fabs(number * scale - exact) <= scale * 0.5001, "%g times %g is not %g", number, scale, exact);
    } else {
      CHECK(number == number_of(from_float<C>(static_cast<float>(exact))), "%.9g, not %.9g", number, exact);
    }
  }
}

template <class T, class C>
void check_case(const Kernels& kernels, const Case& shape) {
  const int64_t kv_width = shape.num_kv_heads * shape.head_dim;
  const int64_t width = shape.num_heads * shape.head_dim + (shape.has_values ? 2 : 1) * kv_width;
  const int64_t row_stride = width + 5;
  const int64_t num_blocks = (shape.num_rows + kBlockSize - 1) / kBlockSize + 1;
  const std::vector<T> before = random_numbers<T>((shape.num_rows - 1) * row_stride + width, 2.0f);
  std::vector<float> cos = random_floats(shape.num_rows * shape.half), sin = cos;
  for (float& angle : cos) angle = std::cos(angle);
  for (float& angle : sin) angle = std::sin(angle);
  const std::vector<float> q_norm = random_floats(shape.head_dim), k_norm = random_floats(shape.head_dim);
  std::vector<int64_t> places(num_blocks * kBlockSize), blocks, offsets;
  std::iota(places.begin(), places.end(), 0);
  std::reverse(places.begin(), places.end());  // the last place of the cache is used
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    blocks.push_back(places[row] / kBlockSize);
    offsets.push_back(places[row] % kBlockSize);
  }

  std::vector<T> first_rows;
  std::vector<C> first_keys;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<T> qkv = before;
    Cache<C> keys(num_blocks, shape), values(num_blocks, shape);
    const int64_t norm_size = shape.has_norms ? shape.head_dim : 0;
    kernels.rotary_and_write_kv({qkv.data(),
                                 TypeOf<T>::dtype,
                                 shape.num_rows,
                                 row_stride,
                                 shape.num_heads,
                                 shape.num_kv_heads,
                                 shape.head_dim,
                                 shape.head_dim,
                                 shape.half ? cos.data() : nullptr,
                                 shape.half ? sin.data() : nullptr,
                                 shape.half,
                                 shape.has_norms ? q_norm.data() : nullptr,
                                 shape.has_norms ? k_norm.data() : nullptr,
                                 norm_size,
                                 norm_size,
                                 kEps,
                                 TypeOf<C>::dtype,
                                 keys.part,
                                 shape.has_values ? values.part : keys.part,
                                 blocks.data(),
                                 offsets.data()},
                                pool);
    std::vector<bool> is_written(keys.scales.size(), false);
    for (int64_t row = 0; row < shape.num_rows; ++row) {
      const std::vector<T> own(before.begin() + row * row_stride, before.begin() + row * row_stride + width);
      const float* angles[2] = {cos.data() + row * shape.half, sin.data() + row * shape.half};
      std::vector<double> expected =
          rotated(own, 0, shape.num_heads, shape, shape.has_norms ? q_norm.data() : nullptr, angles[0], angles[1]);
      const std::vector<double> expected_keys = rotated(own, shape.num_heads, shape.num_kv_heads, shape,
                                                        shape.has_norms ? k_norm.data() : nullptr, angles[0], angles[1]);
      expected.insert(expected.end(), expected_keys.begin(), expected_keys.end());
      const T* result = qkv.data() + row * row_stride;
      for (size_t i = 0; i < expected.size(); ++i) {
        // Rounded after the norm and after the rotation, which adds two of them.
        const double bound = 3 * TypeOf<T>::rounding * (std::fabs(expected[i]) + 3.0);
        CHECK(std::fabs(number_of(result[i]) - expected[i]) <= bound, "%s: %.9g, not %.9g", kernels.instruction_set,
              number_of(result[i]), expected[i]);
      }
      CHECK(!shape.has_values || std::memcmp(result + width - kv_width, own.data() + width - kv_width, kv_width * sizeof(T)) == 0,
            "%s: values changed", kernels.instruction_set);
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        const int64_t place = (blocks[row] * shape.num_kv_heads + head) * kBlockSize + offsets[row];
        is_written[place] = true;
        check_written(keys, place, result + (shape.num_heads + head) * shape.head_dim, shape.head_dim);
        if (!shape.has_values) continue;
        check_written(values, place, result + (shape.num_heads + shape.num_kv_heads + head) * shape.head_dim, shape.head_dim);
      }
    }
    for (size_t place = 0; place < is_written.size(); ++place) {
      const std::vector<char> poison(shape.head_dim * sizeof(C), 99);
      for (const Cache<C>* cache : {&keys, &values}) {
        const bool is_poison = std::memcmp(cache->numbers.data() + place * shape.head_dim, poison.data(), poison.size()) == 0;
        const bool may_change = is_written[place] && (shape.has_values || cache == &keys);
        CHECK(may_change || (is_poison && cache->scales[place] == 99.0f), "%s: place %zu", kernels.instruction_set, place);
      }
    }
    if (num_threads == 1) {
      first_rows = qkv;
      first_keys = keys.numbers;
    }
    CHECK(same_bits(qkv, first_rows) && same_bits(keys.numbers, first_keys), "%s: threads count", kernels.instruction_set);
  }
}

// int8 has no NaN: the scale has to say it, wherever in the head it was.
void an_int8_head_with_a_nan_is_one(const Kernels& kernels) {
  constexpr int64_t kHeadDim = 40;
  const Case shape{2, 1, 1, kHeadDim, 0, false};
  ThreadPool pool(1);
  for (const float unsound : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    for (const int64_t place : {0, 17, 39}) {
      std::vector<float> qkv = random_floats(2 * 3 * kHeadDim);
      qkv[kHeadDim + place] = unsound;  // a key of the first token
      Cache<int8_t> keys(1, shape), values(1, shape);
      const std::vector<int64_t> blocks = {0, 0}, offsets = {0, 1};
      kernels.rotary_and_write_kv({qkv.data(),
                                   DType::kFloat32,
                                   2,
                                   3 * kHeadDim,
                                   1,
                                   1,
                                   kHeadDim,
                                   kHeadDim,
                                   nullptr,
                                   nullptr,
                                   0,
                                   nullptr,
                                   nullptr,
                                   0,
                                   0,
                                   kEps,
                                   DType::kInt8,
                                   keys.part,
                                   values.part,
                                   blocks.data(),
                                   offsets.data()},
                                  pool);
      CHECK(std::isnan(keys.scales[0]), "%s: the scale of a head with %g is %g", kernels.instruction_set, unsound,
            keys.scales[0]);
      CHECK(std::isfinite(keys.scales[1]) && std::isfinite(values.scales[0]), "%s: a NaN spread", kernels.instruction_set);
    }
  }
}

template <class T>
void check_type(const Kernels& kernels) {
  for (const Case& shape : {Case{1, 2, 1, 64, 32, true}, Case{19, 6, 2, 80, 40, false}, Case{60, 4, 4, 80, 11, true},
                            Case{7, 3, 1, 12, 0, false}, Case{5, 3, 1, 12, 6, true}, Case{6, 3, 1, 80, 8, false, false}}) {
    check_case<T, float>(kernels, shape);
    check_case<T, bf16>(kernels, shape);
    check_case<T, fp16>(kernels, shape);
    check_case<T, int8_t>(kernels, shape);
  }
}

int main() {
  for (const Kernels* kernels : all_kernels()) {
    check_type<float>(*kernels);
    check_type<bf16>(*kernels);
    check_type<fp16>(*kernels);
    an_int8_head_with_a_nan_is_one(*kernels);
  }
}
