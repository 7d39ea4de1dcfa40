// Layers with a state against plain loops in double, token by token, on all instruction sets and in several threads. Memory is of
// exactly the size needed; states of other sequences do not change, and what a state holds does not matter to one that begins.
// The state of the last sequence does not take in its last token.
#include "recurrence.h"

#include "check.h"

using namespace quire;
using namespace quire::test;

constexpr int64_t kStates[] = {3, 0, 1}, kEnds[] = {5, 6, 9}, kStateEnds[] = {5, 6, 8}, kBefore[] = {0, 7, 2};
constexpr int64_t kNumSeqs = 3, kNumTokens = 9, kNumStates = 4;
constexpr SequenceRows kSequences{kNumSeqs, kStates, kEnds, kStateEnds, kBefore};

int64_t start_of(int64_t index) { return index == 0 ? 0 : kEnds[index - 1]; }

void check_close(const Kernels& kernels, const char* what, double found, double expected, double rounding) {
  const double error = std::fabs(found - expected);
  CHECK(error <= rounding * (1.0 + std::fabs(expected)), "%s: %s is off by %g", kernels.instruction_set, what, error);
}

template <class T>
void check_conv(const Kernels& kernels, int64_t num_features, int64_t num_taps, bool has_bias, bool has_silu) {
  const int64_t stride = num_features + 3, size = (num_taps - 1) * num_features;
  const std::vector<T> rows = random_numbers<T>(kNumTokens * stride), before = random_numbers<T>(kNumStates * size);
  const std::vector<float> weight = random_floats(num_taps * num_features), bias = random_floats(num_features);
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<T> states = before, out(kNumTokens * num_features);
    for (int64_t i = 0; i < size; ++i) states[kStates[0] * size + i] = from_float<T>(std::nanf(""));
    kernels.conv({rows.data(), out.data(), TypeOf<T>::dtype, stride, num_features, num_taps, weight.data(),
                  has_bias ? bias.data() : nullptr, has_silu, states.data(), size, kSequences},
                 pool);
    for (int64_t index = 0; index < kNumSeqs; ++index) {
      const auto input = [&](int64_t place, int64_t feature) {  // `place` counts from the first token of the step
        if (place >= 0) return number_of(rows[(start_of(index) + place) * stride + feature]);
        if (kBefore[index] == 0) return 0.0;
        return number_of(before[kStates[index] * size + (num_taps - 1 + place) * num_features + feature]);
      };
      const int64_t count = kEnds[index] - start_of(index), num_taken_in = kStateEnds[index] - start_of(index);
      for (int64_t feature = 0; feature < num_features; ++feature) {
        for (int64_t token = 0; token < count; ++token) {
          double total = has_bias ? bias[feature] : 0.0;
          for (int64_t tap = 0; tap < num_taps; ++tap) {
            total += input(token + tap - num_taps + 1, feature) * weight[tap * num_features + feature];
          }
          if (has_silu) total /= 1.0 + std::exp(-total);
          check_close(kernels, "a convolution", number_of(out[(start_of(index) + token) * num_features + feature]), total,
                      8 * TypeOf<T>::rounding);
        }
        for (int64_t tap = 0; tap + 1 < num_taps; ++tap) {
          const double kept = number_of(states[kStates[index] * size + tap * num_features + feature]);
          CHECK(kept == input(num_taken_in + tap - num_taps + 1, feature), "%s: another input kept", kernels.instruction_set);
        }
      }
    }
    CHECK(std::memcmp(&states[2 * size], &before[2 * size], size * sizeof(T)) == 0, "another state changed");
    if (num_threads == 1) first_result = out;
    CHECK(same_bits(out, first_result), "%s: a convolution depends on the threads", kernels.instruction_set);
  }
}

template <class T>
void check_delta_rule(const Kernels& kernels, int64_t key_dim, int64_t value_dim, bool by_channel = false) {
  constexpr int64_t kKeyHeads = 2, kHeads = 4;
  const int64_t num_times = by_channel ? key_dim : 1, strength_stride = kHeads + 1, time_stride = kHeads * num_times + 2;
  const int64_t key_size = kKeyHeads * key_dim, width = 2 * key_size + kHeads * value_dim, size = kHeads * key_dim * value_dim;
  const std::vector<T> qkv = random_numbers<T>(kNumTokens * width);
  const std::vector<T> strengths = random_numbers<T>((kNumTokens - 1) * strength_stride + kHeads);
  const std::vector<T> times = random_numbers<T>((kNumTokens - 1) * time_stride + kHeads * num_times);
  const std::vector<float> decay(kHeads, -0.7f), time_bias = random_floats(kHeads * num_times),
                                                 before = random_floats(kNumStates * size);
  constexpr float kMaxStrength = 1.5f;
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<float> states = before;
    std::vector<T> out(kNumTokens * kHeads * value_dim);
    for (int64_t i = 0; i < size; ++i) states[kStates[0] * size + i] = std::nanf("");
    kernels.delta_rule(
        {qkv.data(), strengths.data(), strength_stride, times.data(), time_stride, out.data(), TypeOf<T>::dtype, kKeyHeads,
         kHeads, key_dim, value_dim, num_times, decay.data(), time_bias.data(), kMaxStrength, states.data(), size, kSequences},
        pool);
    for (int64_t index = 0; index < kNumSeqs; ++index) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t place = kStates[index] * size + head * key_dim * value_dim;
        std::vector<double> memory(&before[place], &before[place] + key_dim * value_dim), taken_in;
        if (kBefore[index] == 0) memory.assign(memory.size(), 0.0);
        for (int64_t token = start_of(index); token < kEnds[index]; ++token) {
          const auto unit = [&](int64_t first) {
            std::vector<double> vector;
            double squares = 1e-6;
            for (int64_t i = 0; i < key_dim; ++i) {
              vector.push_back(number_of(qkv[token * width + first + head / 2 * key_dim + i]));
              squares += vector[i] * vector[i];
            }
            for (double& number : vector) number /= std::sqrt(squares);
            return vector;
          };
          const std::vector<double> query = unit(0), key = unit(key_size);
          const double strength = kMaxStrength / (1.0 + std::exp(-number_of(strengths[token * strength_stride + head])));
          const auto kept = [&](int64_t row) {
            const int64_t place = head * num_times + (by_channel ? row : 0);
            return std::exp(decay[head] * std::log1p(std::exp(number_of(times[token * time_stride + place]) + time_bias[place])));
          };
          for (int64_t column = 0; column < value_dim; ++column) {
            double recalled = 0.0, result = 0.0;
            for (int64_t row = 0; row < key_dim; ++row) recalled += (memory[row * value_dim + column] *= kept(row)) * key[row];
            const double value = number_of(qkv[token * width + 2 * key_size + head * value_dim + column]);
            for (int64_t row = 0; row < key_dim; ++row) {
              memory[row * value_dim + column] += key[row] * (value - recalled) * strength;
              result += memory[row * value_dim + column] * query[row] / std::sqrt(key_dim);
            }
            check_close(kernels, "a recalled value", number_of(out[(token * kHeads + head) * value_dim + column]), result,
                        8 * TypeOf<T>::rounding);
          }
          if (token + 1 == kStateEnds[index]) taken_in = memory;
        }
        for (size_t i = 0; i < memory.size(); ++i) check_close(kernels, "a memory", states[place + i], taken_in.at(i), 1e-4);
      }
    }
    CHECK(std::memcmp(&states[2 * size], &before[2 * size], size * sizeof(float)) == 0, "another state changed");
    if (num_threads == 1) first_result = out;
    CHECK(same_bits(out, first_result), "%s: the delta rule depends on the threads", kernels.instruction_set);
  }
}

template <class T>
void check_scan(const Kernels& kernels, int64_t state_size, int64_t head_dim, float least_time, float most_time) {
  constexpr int64_t kGroups = 2, kHeads = 4;
  const int64_t value_size = kHeads * head_dim, key_size = kGroups * state_size, width = value_size + 2 * key_size;
  const int64_t time_stride = kHeads + 3, out_stride = value_size + 5, size = kHeads * state_size * head_dim;
  const std::vector<T> inputs = random_numbers<T>(kNumTokens * width), times = random_numbers<T>(kNumTokens * time_stride);
  const std::vector<float> decay(kHeads, -0.7f), time_bias = random_floats(kHeads), skip = random_floats(kHeads);
  const std::vector<float> before = random_floats(kNumStates * size);
  std::vector<T> first_result;
  for (const int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<float> states = before;
    std::vector<T> out((kNumTokens - 1) * out_stride + value_size);
    for (int64_t i = 0; i < size; ++i) states[kStates[0] * size + i] = std::nanf("");
    kernels.scan(
        {inputs.data(), times.data(), time_stride, out.data(), out_stride, TypeOf<T>::dtype, kHeads, head_dim, kGroups,
         state_size, decay.data(), time_bias.data(), skip.data(), least_time, most_time, states.data(), size, kSequences},
        pool);
    for (int64_t index = 0; index < kNumSeqs; ++index) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t place = kStates[index] * size + head * state_size * head_dim;
        std::vector<double> memory(&before[place], &before[place] + state_size * head_dim), taken_in;
        if (kBefore[index] == 0) memory.assign(memory.size(), 0.0);
        for (int64_t token = start_of(index); token < kEnds[index]; ++token) {
          const double raw_time = number_of(times[token * time_stride + head]) + time_bias[head];
          const double time = std::fmin(std::fmax(std::log1p(std::exp(raw_time)), least_time), most_time);
          const int64_t key = token * width + value_size + head / 2 * state_size;
          for (int64_t column = 0; column < head_dim; ++column) {
            const double value = number_of(inputs[token * width + head * head_dim + column]);
            double result = value * skip[head];
            for (int64_t row = 0; row < state_size; ++row) {
              double& number = memory[row * head_dim + column];
              number = number * std::exp(decay[head] * time) + time * number_of(inputs[key + row]) * value;
              result += number * number_of(inputs[key + key_size + row]);
            }
            check_close(kernels, "a recalled value", number_of(out[token * out_stride + head * head_dim + column]), result,
                        16 * TypeOf<T>::rounding);
          }
          if (token + 1 == kStateEnds[index]) taken_in = memory;
        }
        for (size_t i = 0; i < memory.size(); ++i) check_close(kernels, "a memory", states[place + i], taken_in.at(i), 1e-4);
      }
    }
    CHECK(std::memcmp(&states[2 * size], &before[2 * size], size * sizeof(float)) == 0, "another state changed");
    if (num_threads == 1) first_result = out;
    CHECK(same_bits(out, first_result), "%s: the scan depends on the threads", kernels.instruction_set);
  }
}

template <class T>
void check_all(const Kernels& kernels) {
  for (const int64_t num_features : {16, 21, 600}) {
    for (const int64_t num_taps : {2, 4}) check_conv<T>(kernels, num_features, num_taps, num_taps == 2, num_taps == 4);
  }
  check_conv<T>(kernels, 16, kMaxTaps, true, false);
  check_delta_rule<T>(kernels, 16, 32);
  check_delta_rule<T>(kernels, 7, 5);
  check_delta_rule<T>(kernels, kMaxKeyDim, 40);
  check_delta_rule<T>(kernels, 16, 32, /*by_channel=*/true);
  check_delta_rule<T>(kernels, 7, 5, /*by_channel=*/true);
  check_scan<T>(kernels, 16, 32, 0.0f, INFINITY);
  check_scan<T>(kernels, 7, 5, 0.5f, 0.9f);
  check_scan<T>(kernels, kMaxKeyDim, 40, 0.0f, 1.0f);
}

int main() {
  for (const Kernels* kernels : all_kernels()) {
    check_all<float>(*kernels);
    check_all<bf16>(*kernels);
    check_all<fp16>(*kernels);
  }
  return 0;
}
