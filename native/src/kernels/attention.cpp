// See attention.h. Compiled once for each instruction set.
#include "attention.h"

#include "attention_key_scores.h"
#include "attention_rows.h"
#include "attention_scratch.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "simd.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace quire::QUIRE_BASE_ISA {

void attention(const AttentionCall& call, ThreadPool& pool);

}  // namespace quire::QUIRE_BASE_ISA

namespace quire::QUIRE_ISA {
namespace {

// One KV head of one row block, in memory of one thread. T: what the cache holds.
template <class Path, class T>
class HeadTask {
 public:
  HeadTask(const AttentionCall& call, const TileBias& bias, const Layout& layout, const RowBlock& block, int64_t head, int thread)
      : call_(call), bias_(bias), layout_(layout), rows_(call, block, head), kept_(call, layout) {
    char* memory = call.scratch + layout.threads + thread * layout.thread.total;
    query_ = reinterpret_cast<Number*>(memory + layout.thread.query);
    query_rows_ = reinterpret_cast<QueryRow*>(memory + layout.thread.query_rows);
    keys_ = memory + layout.thread.keys;
    values_ = memory + layout.thread.values;
    scores_ = reinterpret_cast<float*>(memory + layout.thread.scores);
    weights_ = reinterpret_cast<Number*>(memory + layout.thread.weights);
    tiles_ = reinterpret_cast<Tile*>(memory + layout.thread.tiles);
    span_ = State::at(memory + layout.thread.states[0], layout.thread.num_rows);
    merged_ = State::at(memory + layout.thread.states[1], layout.thread.num_rows);
  }

  // The whole block: its spans one after the other.
  void attend() {
    rows_.take_query(query_, query_rows_);
    attend_spans(&HeadTask::attend_span);
    finish();
  }

  // One of its spans, to be merged later.
  void attend_part(int span) {
    rows_.take_query(query_, query_rows_);
    attend_span(span, partial(span));
  }

  void merge_parts() {
    merged_ = partial(0);
    for (int span = 1; span < rows_.block.num_spans; ++span) merge(merged_, partial(span), rows_.count(), rows_.value_dim);
    finish();
  }

  // Adds what the block's rows give to each key to the sums of their sequences; needs the rows' normalizers.
  void sum_key_scores() {
    rows_.take_query(query_, query_rows_);
    for (int span = 0; span < rows_.block.num_spans; ++span) {
      const AttentionSpan& visits = rows_.span(span);
      for (int64_t visit = visits.first_visit; visit < visits.first_visit + visits.num_visits; ++visit) {
        if (has_sums(rows_.plan.visits[visit])) sum_key_scores_of(rows_.plan.visits[visit]);
      }
    }
  }

 private:
  using Number = typename Path::Number;
  using AttendSpan = void (HeadTask::*)(int span, const State& state);

  State partial(int span) const {
    const int64_t index = rows_.head * rows_.plan.num_spans + rows_.block.first_span + span;
    return State::at(call_.scratch + layout_.partials + index * layout_.partial_bytes, layout_.thread.num_rows);
  }

  void attend_spans(AttendSpan attend_one) {
    (this->*attend_one)(0, merged_);
    for (int span = 1; span < rows_.block.num_spans; ++span) {
      (this->*attend_one)(span, span_);
      merge(merged_, span_, rows_.count(), rows_.value_dim);
    }
  }

  void attend_span(int span, const State& state) {
    clear(state, rows_.count(), rows_.value_dim);
    const AttentionSpan& visits = rows_.span(span);
    for (int i = 0; i < visits.num_visits; ++i) {
      const AttentionVisit& visit = rows_.plan.visits[visits.first_visit + i];
      Tile& tile = tiles_[i % 2];
      Tile& next = tiles_[(i + 1) % 2];
      if (i == 0) rows_.template locate<T>(visit, rows_.head, tile);
      const bool is_fetched = rows_.template locate_following<T>(span, i + 1, next);
      rows_.take_scales(tile);
      attend_tile(visit, tile, is_fetched ? &next : nullptr, state);
    }
  }

  // The same, with the same bits, a token at a time and with nothing in the tile that the token does not see.
  void attend_span_apart(int span, const State& state) {
    clear(state, rows_.count(), rows_.value_dim);
    const AttentionSpan& visits = rows_.span(span);
    for (int i = 0; i < visits.num_visits; ++i) {
      const AttentionVisit& visit = rows_.plan.visits[visits.first_visit + i];
      for (int token = visit.first_token; token < visit.first_token + visit.num_tokens; ++token) {
        AttentionVisit own = visit;
        own.first_token = token;
        own.num_tokens = 1;
        rows_.limits(visit, rows_.first_row(own), &own.first_key, &own.end_key);
        ++own.end_key;
        rows_.template locate<T>(own, rows_.head, *tiles_);
        rows_.take_scales(*tiles_);
        attend_tile(own, *tiles_, nullptr, state);
      }
    }
  }

  void attend_tile(const AttentionVisit& visit, const Tile& tile, const Tile* next, const State& state) {
    const int64_t head_dim = rows_.head_dim, first_row = rows_.first_row(visit), end_row = rows_.end_row(visit);
    Ahead ahead{nullptr, 0, 0};
    if (next != nullptr) ahead = {next->rows[0], 2 * kTileTokens, head_dim / kFeatures<T> * static_cast<int64_t>(sizeof(T))};
    if (end_row - first_row <= kChunkRows) {
      const int count = static_cast<int>(end_row - first_row);
      score_unpacked<Path, T>(count, query_ + first_row * head_dim, head_dim, tile, visit.first_key, visit.end_key, scores_,
                              ahead);
      take_scores(visit, tile, first_row, count, UnpackedValues<Path, T>{&tile}, state, ahead);
      return;
    }
    pack_keys<Path, T>(tile, ahead, visit.first_key, visit.end_key, head_dim, keys_);
    pack_values<Path, T>(tile, ahead, visit.first_key, visit.end_key, rows_.value_dim, values_);
    for (int64_t row = first_row; row < end_row; row += kPackedRows<Path>) {
      const int count = static_cast<int>(min(kPackedRows<Path>, end_row - row));
      score<Path>(registers_, count, query_ + row * head_dim, head_dim, rows_.seen(visit, row, count), keys_, scores_, ahead);
      take_scores(visit, tile, row, count, PackedValues<Path>{values_, rows_.value_dim}, state, ahead);
    }
  }

  // Takes what the scores of some rows give into their state.
  template <class Values>
  QUIRE_INLINE void take_scores(const AttentionVisit& visit, const Tile& tile, int64_t first_row, int count, const Values& values,
                                const State& state, Ahead& ahead) {
    const float* value_scales = sizeof(T) == 1 ? tile.scales[1] : nullptr;
    float factors[kPackedRows<Path>], units[kPackedRows<Path>];
    for (int i = 0; i < count; ++i) {
      const int64_t row = first_row + i;
      f32x16 scores[kTileVectors];
      finish_scores_of(visit, tile, row, i, scores);
      float* kept = nullptr;
      if (call_.key_scores != nullptr) kept = kept_.weights(rows_.token_of(row), rows_.query_head(row), visit.tile);
      const Weighed weighed =
          weigh(scores, value_scales, state.best + row, state.sums + row * kLanes, weights_ + i * kTileTokens, kept);
      factors[i] = weighed.factor;
      units[i] = weighed.unit;
      if (kept != nullptr) kept_.note_best(kept, state.best[row]);
    }
    add_values<Path>(registers_, count,
                     {weights_, factors, units, rows_.seen(visit, first_row, count), rows_.value_dim,
                      state.totals + first_row * rows_.value_dim},
                     values, ahead);
  }

  // The scores of row `row`, which has them at `index`.
  QUIRE_INLINE void finish_scores_of(const AttentionVisit& visit, const Tile& tile, int64_t row, int index,
                                     f32x16 (&scores)[kTileVectors]) const {
    int first, last;
    rows_.limits(visit, row, &first, &last);
    const float* products = scores_ + index * kTileTokens;
    for (int i = 0; i < kTileVectors; ++i) scores[i] = Path::template load_scores<T>(products + i * kLanes, query_rows_[row]);
    finish_scores(call_, sizeof(T) == 1 ? tile.scales[0] : nullptr, first, last, scores);
    if (!bias_) return;
    f32x16 biased[kTileVectors];  // so that without a bias, no score has to be in memory
    for (int i = 0; i < kTileVectors; ++i) biased[i] = scores[i];
    const int64_t distance = static_cast<int64_t>(visit.tile) * kTileTokens - rows_.token_of(row).place;
    bias_.add_to(biased, rows_.query_head(row), distance);
    for (int i = 0; i < kTileVectors; ++i) scores[i] = biased[i];
  }

  // A weight of zero times NaN is NaN: a row may have one from a value that only its neighbours see. Not if it is alone.
  void finish() {
    if (write()) return;
    rows_.take_query(query_, query_rows_);
    attend_spans(&HeadTask::attend_span_apart);
    write();
  }

  bool write() const {
    switch (call_.query_type) {
      case DType::kBFloat16: return write_rows(static_cast<bf16*>(call_.out));
      case DType::kFloat16: return write_rows(static_cast<fp16*>(call_.out));
      default: return write_rows(static_cast<float*>(call_.out));
    }
  }

  // Returns whether no number is NaN.
  template <class To>
  bool write_rows(To* to) const {
    const int64_t value_dim = rows_.value_dim;
    f32x16 unsound{};  // NaN where one was found
    for (int64_t row = 0; row < rows_.count(); ++row) {
      float sum = sum_of_lanes(load(merged_.sums + row * kLanes));
      float best = merged_.best[row];
      float factor = 1.0f;
      if (call_.sinks != nullptr) {
        const float sink = call_.sinks[rows_.query_head(row)];
        if (sink > best) {
          factor = exp(splat(best - sink))[0];
          best = sink;
        }
        sum = sum * factor;
        sum = sum + exp(splat(sink - best))[0];
      }
      if (rows_.kv.is_rotated()) rotate(merged_.totals + row * value_dim, value_dim);
      const f32x16 scale = splat(factor / sum);
      const int64_t place = rows_.place(row);
      for (int64_t i = 0; i < value_dim; i += kLanes) {
        const f32x16 values = load(merged_.totals + row * value_dim + i) * scale;
        unsound = select(values == values, unsound, values);
        store(to + place * value_dim + i, values);
      }
      if (call_.key_scores != nullptr) {
        kept_.finish_row(rows_.token_of(row), rows_.query_head(row), merged_.best[row], factor / sum);
        note_normalizers(row, best, 1.0f / sum);
      }
    }
    return sum_of_lanes(unsound) == 0.0f;
  }

  float* normalizers(int64_t row) const {
    return reinterpret_cast<float*>(call_.scratch + layout_.normalizers) + 2 * rows_.place(row);
  }

  void note_normalizers(int64_t row, float best, float inverse_sum) const {
    if (call_.key_scores->num_sums == 0) return;
    normalizers(row)[0] = best;
    normalizers(row)[1] = inverse_sum;
  }

  int64_t sum_start(int64_t row) const { return call_.key_scores->sum_starts[rows_.token_of(row).row]; }

  bool has_sums(const AttentionVisit& visit) const {
    for (int64_t row = rows_.first_row(visit); row < rows_.end_row(visit); row += rows_.group) {
      if (sum_start(row) >= 0) return true;
    }
    return false;
  }

  void sum_key_scores_of(const AttentionVisit& visit) {
    Tile& tile = tiles_[0];
    rows_.template locate<T>(visit, rows_.head, tile);
    rows_.take_scales(tile);
    Ahead nothing{nullptr, 0, 0};
    pack_keys<Path, T>(tile, nothing, visit.first_key, visit.end_key, rows_.head_dim, keys_);
    TileSums sums;
    int64_t* to = nullptr;  // the sums of the rows' sequence; the next row may be of another one
    const int64_t end_row = rows_.end_row(visit);
    for (int64_t row = rows_.first_row(visit); row < end_row; row += kPackedRows<Path>) {
      const int count = static_cast<int>(min(kPackedRows<Path>, end_row - row));
      score<Path>(registers_, count, query_ + row * rows_.head_dim, rows_.head_dim, rows_.seen(visit, row, count), keys_, scores_,
                  nothing);
      for (int i = 0; i < count; ++i) {
        const int64_t start = sum_start(row + i);
        if (start < 0) continue;
        int64_t* own = call_.key_scores->sums + start + static_cast<int64_t>(visit.tile) * kTileTokens;
        if (own != to && to != nullptr) sums.move_to(to);
        to = own;
        add_weights(visit, row + i, i, sums);
      }
    }
    sums.move_to(to);
  }

  // Adds the weights of row `row`, which has its scores at `index`; if they are not finite, nothing.
  QUIRE_INLINE void add_weights(const AttentionVisit& visit, int64_t row, int index, TileSums& sums) const {
    const float best = normalizers(row)[0], inverse_sum = normalizers(row)[1];
    if (!(inverse_sum > 0.0f)) return;
    f32x16 weights[kTileVectors];
    finish_scores_of(visit, tiles_[0], row, index, weights);
    for (f32x16& weight : weights) weight = exp(weight - best) * inverse_sum;
    sums.add(weights);
  }

  const AttentionCall& call_;
  const TileBias& bias_;
  const Layout& layout_;
  const HeadRows rows_;
  const KeptWeights kept_;
  Number* query_;
  QueryRow* query_rows_;
  char* keys_;
  char* values_;
  float* scores_;
  Number* weights_;
  Tile* tiles_;
  State span_;
  State merged_;
  typename Path::Registers registers_;
};

template <class Path, class T>
void attend(const AttentionCall& call, ThreadPool& pool) {
  using Task = HeadTask<Path, T>;
  const AttentionPlan& plan = *call.plan;
  const int64_t num_heads = call.kv->num_kv_heads * plan.group;
  const TileBias bias(call.distance_bias, num_heads);
  const Layout layout(call, pool.num_threads());
  const int64_t num_shared_tasks = call.kv->num_kv_heads * plan.num_shared_blocks();
  const int64_t num_tasks = num_shared_tasks + plan.num_head_blocks;
  const auto task_of = [&](int64_t task, int thread) {
    if (task < num_shared_tasks) {
      return Task(call, bias, layout, plan.blocks[task / call.kv->num_kv_heads], task % call.kv->num_kv_heads, thread);
    }
    const RowBlock& block = plan.blocks[plan.num_shared_blocks() + task - num_shared_tasks];
    return Task(call, bias, layout, block, block.query_head / plan.group, thread);
  };
  const KeptWeights kept(call, layout);
  if (call.key_scores != nullptr) kept.clear(num_heads);
  if (layout.is_split) {
    parallel_for(pool, call.kv->num_kv_heads * plan.num_spans, [&](int64_t task, int thread) {
      const int64_t span = task % plan.num_spans;
      int64_t block = 0;
      while (span < plan.blocks[block].first_span || span >= plan.blocks[block].first_span + plan.blocks[block].num_spans)
        ++block;
      Task(call, bias, layout, plan.blocks[block], task / plan.num_spans, thread)
          .attend_part(static_cast<int>(span - plan.blocks[block].first_span));
    });
    parallel_for(pool, num_tasks, [&](int64_t task, int thread) { task_of(task, thread).merge_parts(); });
  } else {
    parallel_for(pool, num_tasks, [&](int64_t task, int thread) { task_of(task, thread).attend(); });
  }
  if (call.key_scores == nullptr) return;
  parallel_for(pool, kept.num_tile_groups(), [&](int64_t tiles, int) { kept.write_tiles(tiles, num_heads); });
  if (call.key_scores->num_sums == 0) return;
  std::memset(call.key_scores->sums, 0, call.key_scores->num_sums * sizeof(int64_t));
  parallel_for(pool, num_tasks, [&](int64_t task, int thread) { task_of(task, thread).sum_key_scores(); });
}

}  // namespace

int64_t attention_scratch(const AttentionCall& call, int num_threads) { return Layout(call, num_threads).total; }

#if defined(__AMX_BF16__)

void attention(const AttentionCall& call, ThreadPool& pool) {
  if (call.query_type == DType::kBFloat16 && call.kv->head_dim % AmxPath::kGroupFeatures == 0) {
    if (call.kv->type == DType::kBFloat16) return attend<AmxPath, bf16>(call, pool);
    if (call.kv->type == DType::kInt8) return attend<AmxPath, int8_t>(call, pool);
    if (call.kv->type == DType::kInt4) return attend<AmxPath, Int4Pair>(call, pool);
  }
  QUIRE_BASE_ISA::attention(call, pool);
}

#else

void attention(const AttentionCall& call, ThreadPool& pool) {
#if defined(__AVX512BF16__)
  if (call.query_type == DType::kBFloat16 && call.kv->type == DType::kBFloat16) return attend<BFloat16Path, bf16>(call, pool);
#endif
#if defined(__AVX512VNNI__)
  if (call.query_type == DType::kBFloat16) {
    if (call.kv->type == DType::kInt8) return attend<BytesPath, int8_t>(call, pool);
    if (call.kv->type == DType::kInt4) return attend<Int4Path, Int4Pair>(call, pool);
  }
#endif
  switch (call.kv->type) {
    case DType::kBFloat16: return attend<Float32Path, bf16>(call, pool);
    case DType::kFloat16: return attend<Float32Path, fp16>(call, pool);
    case DType::kInt8: return attend<Float32Path, int8_t>(call, pool);
    case DType::kInt4: return attend<Float32Path, Int4Pair>(call, pool);
    default: return attend<Float32Path, float>(call, pool);
  }
}

#endif

}  // namespace quire::QUIRE_ISA
