// What key blocks matter to a query block, by the estimate of KeySelection (quire/kernels/attention/sparse_prefill.py). Compiled once for
// each instruction set.
//
// The queries of a row are put one behind the other, the last one first, and so are the keys of a column as they come: then the
// products along an antidiagonal are one long product. Everything is float32, and each product has one accumulator.
#include "attention.h"
#include "attention_rows.h"
#include "simd.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

// Rows and columns that have their products in registers together.
#if defined(__AVX512F__)
constexpr int kMeanRows = 4;
constexpr int kMeanColumns = 4;
#elif defined(__AVX2__)
constexpr int kMeanRows = 2;
constexpr int kMeanColumns = 2;
#else
constexpr int kMeanRows = 1;
constexpr int kMeanColumns = 2;
#endif

struct MassLayout {
  int64_t num_rows;     // of a query block and one query head
  int64_t padded_rows;  // of all query heads of a KV head
  int64_t width;        // numbers of a row
  int64_t num_columns;  // at most
  int64_t scores;       // bytes from the start of a thread's memory, behind the rows
  int64_t total;

  MassLayout(const AttentionCall& call, const KeySelection& selection)
      : num_rows(selection.block_size / selection.stride),
        padded_rows(round_up(num_rows * call.plan->group, kMeanRows)),
        width(selection.stride * call.kv->head_dim),
        num_columns(round_up(ceil_div(selection.max_keys, selection.stride), kLanes)),
        scores(round_up(padded_rows * width * 4, kLine)),
        total(scores + round_up(padded_rows * num_columns * 4, kLine)) {}
};

// One query block and the query heads of one KV head.
template <class T>
class MassTask {
 public:
  MassTask(const AttentionCall& call, const KeySelection& selection, const MassLayout& layout, const QueryBlock& block,
           int64_t head, char* memory)
      : call_(call),
        selection_(selection),
        layout_(layout),
        block_(block),
        head_(head),
        rows_(reinterpret_cast<float*>(memory)),
        scores_(reinterpret_cast<float*>(memory + layout.scores)) {}

  void run(double* masses) {
    take_query();
    const int64_t num_columns = ceil_div(block_.num_keys, selection_.stride);
    for (int64_t column = 0; column < num_columns; column += kMeanColumns) multiply(column);
    for (int64_t head = 0; head < call_.plan->group; ++head) {
      double* to = masses + (head_ * call_.plan->group + head) * block_.num_key_blocks;
      for (int64_t i = 0; i < block_.num_key_blocks; ++i) to[i] = 0.0;
      const int64_t first = block_.first_position % selection_.block_size;
      const int64_t last_row = (first + block_.num_tokens - 1) / selection_.stride;
      for (int64_t row = first / selection_.stride; row <= last_row; ++row) add_row(head, row, to);
    }
  }

 private:
  float* row_at(int64_t head, int64_t row) const { return rows_ + (head * layout_.num_rows + row) * layout_.width; }

  void take_query() {
    std::memset(rows_, 0, layout_.padded_rows * layout_.width * sizeof(float));
    switch (call_.query_type) {
      case DType::kBFloat16: return take_query_from(static_cast<const bf16*>(call_.query));
      case DType::kFloat16: return take_query_from(static_cast<const fp16*>(call_.query));
      default: return take_query_from(static_cast<const float*>(call_.query));
    }
  }

  template <class From>
  void take_query_from(const From* from) {
    const int64_t head_dim = call_.kv->head_dim, group = call_.plan->group;
    for (int64_t token = 0; token < block_.num_tokens; ++token) {
      const int64_t place = block_.first_position % selection_.block_size + token;
      const int64_t part = selection_.stride - 1 - place % selection_.stride;
      for (int64_t head = 0; head < group; ++head) {
        const From* numbers = from + (block_.first_row + token) * call_.query_stride + (head_ * group + head) * head_dim;
        float* to = row_at(head, place / selection_.stride) + part * head_dim;
        for (int64_t i = 0; i < head_dim; i += kLanes) store(to + i, load(numbers + i));
        if (call_.kv->is_rotated()) rotate(to, head_dim);
      }
    }
  }

  // The products of all rows with kMeanColumns columns.
  void multiply(int64_t first_column) {
    const T* keys[kMeanColumns * kMaxStride];
    float scales[kMeanColumns * kMaxStride];
    for (int64_t i = 0; i < kMeanColumns * selection_.stride; ++i) {
      keys[i] = key_at(first_column * selection_.stride + i, scales + i);
    }
    for (int64_t row = 0; row < layout_.padded_rows; row += kMeanRows) multiply_rows(row, first_column, keys, scales);
  }

  void multiply_rows(int64_t first_row, int64_t first_column, const T* const* keys, const float* scales) {
    const int64_t head_dim = call_.kv->head_dim, stride = selection_.stride;
    f32x16 sums[kMeanRows][kMeanColumns] = {};
    for (int64_t part = 0; part < stride; ++part) {
      const float* at = rows_ + first_row * layout_.width + part * head_dim;
#pragma GCC unroll 1
      for (int64_t i = 0; i < head_dim; i += kLanes) {
        f32x16 numbers[kMeanColumns];
#pragma GCC unroll 4
        for (int column = 0; column < kMeanColumns; ++column) {
          numbers[column] = load(feature_of(keys[column * stride + part], i));
          if (sizeof(T) == 1) numbers[column] = numbers[column] * scales[column * stride + part];
        }
#pragma GCC unroll 4
        for (int row = 0; row < kMeanRows; ++row) {
          const f32x16 query = load(at + row * layout_.width + i);
#pragma GCC unroll 4
          for (int column = 0; column < kMeanColumns; ++column) sums[row][column] += query * numbers[column];
        }
      }
    }
    for (int row = 0; row < kMeanRows; ++row) {
      float* to = scores_ + (first_row + row) * layout_.num_columns + first_column;
      for (int column = 0; column < kMeanColumns; ++column) to[column] = sum_of_lanes(sums[row][column]);
    }
  }

  // A key that is not there is zero.
  const T* key_at(int64_t place, float* scale) const {
    *scale = 0.0f;
    if (place >= block_.num_keys) return reinterpret_cast<const T*>(kZeros);
    const AttentionPlan& plan = *call_.plan;
    const CachePart& keys = call_.kv->keys;
    const int64_t entry = plan.block_tables[block_.sequence * plan.table_stride + place / plan.block_size];
    const int64_t offset = place % plan.block_size;
    if (keys.scales != nullptr) {
      *scale = keys.scales[entry * keys.scale_strides[0] + head_ * keys.scale_strides[1] + offset * keys.scale_strides[2]];
    }
    return static_cast<const T*>(keys.numbers) + entry * keys.strides[0] + head_ * keys.strides[1] + offset * keys.strides[2];
  }

  // Adds the softmax of a row's mean scores to the masses of the key blocks.
  void add_row(int64_t head, int64_t row, double* masses) {
    float* scores = scores_ + (head * layout_.num_rows + row) * layout_.num_columns;
    const int64_t per_block = layout_.num_rows;
    const int64_t count = (block_.num_key_blocks - 1) * per_block + row + 1;  // columns that the row sees
    float best = -__builtin_inff();
    for (int64_t i = 0; i < count; i += kLanes) {
      f32x16 means = load(scores + i) * (1.0f / static_cast<float>(selection_.stride)) * call_.scale;
      if (call_.softcap != 0.0f) means = tanh(means * (1.0f / call_.softcap)) * call_.softcap;
      store(scores + i, means);
      for (int64_t lane = 0; lane < min(kLanes, count - i); ++lane) best = means[lane] > best ? means[lane] : best;
    }
    for (int64_t i = 0; i < count; i += kLanes) store(scores + i, exp(load(scores + i) - best));
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += scores[i];
    for (int64_t i = 0; i < count; ++i) masses[i / per_block] += scores[i] / total;
  }

  const AttentionCall& call_;
  const KeySelection& selection_;
  const MassLayout& layout_;
  const QueryBlock& block_;
  const int64_t head_;
  float* rows_;
  float* scores_;
};

template <class T>
void masses_of(const AttentionCall& call, const KeySelection& selection, double* masses, ThreadPool& pool) {
  const MassLayout layout(call, selection);
  const int64_t num_kv_heads = call.kv->num_kv_heads, num_heads = num_kv_heads * call.plan->group;
  parallel_for(pool, selection.num_blocks * num_kv_heads, [&](int64_t task, int thread) {
    const QueryBlock& block = selection.blocks[task / num_kv_heads];
    if (!block.has_choice()) return;
    MassTask<T>(call, selection, layout, block, task % num_kv_heads, call.scratch + thread * layout.total)
        .run(masses + num_heads * block.first_mass);
  });
}

}  // namespace

int64_t mass_scratch(const AttentionCall& call, const KeySelection& selection, int num_threads) {
  return num_threads * MassLayout(call, selection).total;
}

void masses(const AttentionCall& call, const KeySelection& selection, double* to, ThreadPool& pool) {
  switch (call.kv->type) {
    case DType::kBFloat16: return masses_of<bf16>(call, selection, to, pool);
    case DType::kFloat16: return masses_of<fp16>(call, selection, to, pool);
    case DType::kInt8: return masses_of<int8_t>(call, selection, to, pool);
    case DType::kInt4: return masses_of<Int4Pair>(call, selection, to, pool);
    default: return masses_of<float>(call, selection, to, pool);
  }
}

}  // namespace quire::QUIRE_ISA
