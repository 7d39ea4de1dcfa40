// See attention.h. Compiled once for each instruction set.
#include "attention.h"

#include "attention_softmax.h"
#include "attention_tiles.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTasksPerThread = 4;                // below that, the spans of a row block become tasks of their own
constexpr int64_t kMaxPartialBytes = int64_t{64} << 20;  // unless their states would take more than this

alignas(64) constexpr char kZeros[kMaxHeadDim * sizeof(float)] = {};

QUIRE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// What a thread works in.
struct Workspace {
  char* query;
  char* keys;
  char* values;
  float* scores;
  char* weights;
  Tile* tiles;
  State span;
  State merged;

  static int64_t carve(const AttentionCall& call, char* memory, Workspace* workspace) {
    const int64_t num_rows = call.plan->max_rows(), head_dim = call.kv->head_dim;
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
      char* part = memory + used;
      used += lines(bytes);
      return part;
    };
    workspace->query = take(num_rows * head_dim * 4);
    workspace->keys = take(kTileTokens * head_dim * 4);
    workspace->values = take(kTileTokens * head_dim * 4);
    workspace->scores = reinterpret_cast<float*>(take(kChunkRows * kTileTokens * 4));
    workspace->weights = take(kChunkRows * kTileTokens * 4);
    workspace->tiles = reinterpret_cast<Tile*>(take(2 * sizeof(Tile)));
    workspace->span = State::at(take(State::bytes(num_rows, head_dim)), num_rows);
    workspace->merged = State::at(take(State::bytes(num_rows, head_dim)), num_rows);
    return used;
  }
};

// Where the parts of a call's scratch memory begin.
struct Layout {
  int64_t normalizers;  // [2, T, heads] maximum and reciprocal sum of each row, if there are key scores
  int64_t visit_scores;  // [visits, 64], likewise
  int64_t partials;     // states of the spans, if those are tasks of their own
  int64_t partial_bytes;
  int64_t threads;
  int64_t thread_bytes;
  int64_t total;
  bool is_split;

  Layout(const AttentionCall& call, int num_threads) {
    const AttentionPlan& plan = *call.plan;
    const int64_t num_heads = call.kv->num_kv_heads * plan.group;
    normalizers = 0;
    visit_scores = normalizers + (call.key_scores != nullptr ? lines(2 * plan.num_tokens * num_heads * 4) : 0);
    partials = visit_scores + (call.key_scores != nullptr ? plan.num_visits * kTileTokens * 4 : 0);
    partial_bytes = lines(State::bytes(plan.max_rows(), call.kv->head_dim));
    const int64_t all_partials = plan.num_spans * call.kv->num_kv_heads * partial_bytes;
    is_split = num_threads > 1 && plan.num_spans > plan.num_blocks && all_partials <= kMaxPartialBytes &&
               plan.num_blocks * call.kv->num_kv_heads < kTasksPerThread * num_threads;
    threads = partials + (is_split ? all_partials : 0);
    Workspace unused;
    thread_bytes = Workspace::carve(call, nullptr, &unused);
    total = threads + num_threads * thread_bytes;
  }
};

// -- one KV head of one row block -----------------------------------------------------------------------------------------------

template <class Path, class T>
class HeadTask {
 public:
  HeadTask(const AttentionCall& call, const Layout& layout, const RowBlock& block, int64_t head, int thread)
      : call_(call), plan_(*call.plan), kv_(*call.kv), layout_(layout), block_(block), head_(head) {
    Workspace::carve(call, call.scratch + layout.threads + thread * layout.thread_bytes, &work_);
    num_rows_ = static_cast<int64_t>(block.num_tokens) * plan_.group;
    head_dim_ = kv_.head_dim;
  }

  // The whole block: its spans one after the other.
  void attend() {
    take_query();
    for (int span = 0; span < block_.num_spans; ++span) {
      attend_span(span, work_.span);
      take_span(span == 0, work_.span);
    }
    finish();
  }

  // One of its spans, to be merged later.
  void attend_part(int span) {
    take_query();
    attend_span(span, partial(span));
  }

  void merge_parts() {
    for (int span = 0; span < block_.num_spans; ++span) {
      State state = partial(span);
      if (span == 0) {
        work_.merged = state;
      } else {
        merge(work_.merged, state, num_rows_, head_dim_);
      }
    }
    finish();
  }

  // The weight that each key of each visit gets from the block's rows; needs the rows' normalizers.
  void score_keys() {
    take_query();
    const AttentionSpan& last = plan_.spans[block_.first_span + block_.num_spans - 1];
    const int64_t first_visit = plan_.spans[block_.first_span].first_visit;
    for (int64_t visit = first_visit; visit < last.first_visit + last.num_visits; ++visit) score_keys_of(visit);
  }

 private:
  using Number = typename Path::Number;

  State partial(int span) const {
    const int64_t index = head_ * plan_.num_spans + block_.first_span + span;
    return State::at(call_.scratch + layout_.partials + index * layout_.partial_bytes, plan_.max_rows());
  }

  void take_span(bool is_first, State& span) {
    if (is_first) {
      const State merged = work_.merged;
      work_.merged = span;
      span = merged;
    } else {
      merge(work_.merged, span, num_rows_, head_dim_);
    }
  }

  const AttentionToken& token_of(int64_t row) const { return plan_.tokens[block_.first_token + row / plan_.group]; }

  int64_t query_place(int64_t row) const {
    return token_of(row).row * call_.query_stride + (head_ * plan_.group + row % plan_.group) * head_dim_;
  }

  template <class From>
  void take_query_from(const From* from) {
    Number* to = reinterpret_cast<Number*>(work_.query);
    for (int64_t row = 0; row < num_rows_; ++row, to += head_dim_) {
      const From* numbers = from + query_place(row);
      for (int64_t i = 0; i < head_dim_; i += kLanes) store(to + i, load(numbers + i));
    }
  }

  void take_query() {
    switch (call_.query_type) {
      case DType::kBFloat16: return take_query_from(static_cast<const bf16*>(call_.query));
      case DType::kFloat16: return take_query_from(static_cast<const fp16*>(call_.query));
      default: return take_query_from(static_cast<const float*>(call_.query));
    }
  }

  // Calls visit(first token in the tile, count, block, offset in it) for the parts of a visit that lie in one block each.
  template <class Visit>
  QUIRE_INLINE void for_each_piece(const AttentionVisit& visit, const Visit& function) const {
    const int32_t* table = plan_.block_tables + visit.sequence * plan_.table_stride;
    const int64_t start = static_cast<int64_t>(visit.tile) * kTileTokens;
    for (int key = visit.first_key; key < visit.end_key;) {
      const int64_t entry = (start + key) / plan_.block_size;
      const int64_t offset = (start + key) % plan_.block_size;
      const int count = static_cast<int>(smaller(plan_.block_size - offset, visit.end_key - key));
      function(key, count, static_cast<int64_t>(table[entry]), offset);
      key += count;
    }
  }

  void locate(const AttentionVisit& visit, int64_t head, Tile& tile) const {
    for (int key = 0; key < kTileTokens; ++key) {
      if (key == visit.first_key) key = visit.end_key;
      if (key >= kTileTokens) break;
      tile.rows[0][key] = tile.rows[1][key] = kZeros;
      tile.key_scales[key] = tile.value_scales[key] = 0.0f;
    }
    for_each_piece(visit, [&](int key, int count, int64_t block, int64_t offset) {
      locate_piece(kv_.keys, head, block, offset, count, tile.rows[0] + key, tile.key_scales + key);
      locate_piece(kv_.values, head, block, offset, count, tile.rows[1] + key, tile.value_scales + key);
    });
  }

  QUIRE_INLINE void locate_piece(const CachePart& part, int64_t head, int64_t block, int64_t offset, int count,
                                 const char** rows, float* scales) const {
    const int64_t token_bytes = part.strides[2] * static_cast<int64_t>(sizeof(T));
    const char* row = static_cast<const char*>(part.numbers) +
                      (block * part.strides[0] + head * part.strides[1]) * static_cast<int64_t>(sizeof(T)) + offset * token_bytes;
    for (int i = 0; i < count; ++i) rows[i] = row + i * token_bytes;
    if (part.scales == nullptr) return;
    const float* scale = part.scales + block * part.scale_strides[0] + head * part.scale_strides[1];
    for (int i = 0; i < count; ++i) scales[i] = scale[(offset + i) * part.scale_strides[2]];
  }

  // The first and the last key of a tile that a row sees.
  QUIRE_INLINE void limits(const AttentionVisit& visit, int64_t row, int* first, int* last) const {
    const int64_t position = token_of(row).position - static_cast<int64_t>(visit.tile) * kTileTokens;
    const int64_t oldest = plan_.window == 0 ? 0 : position - plan_.window + 1;
    *first = oldest > 0 ? static_cast<int>(oldest) : 0;
    *last = static_cast<int>(smaller(position, kTileTokens - 1));
  }

  void attend_span(int span, const State& state) {
    clear(state, num_rows_, head_dim_);
    const AttentionSpan& visits = plan_.spans[block_.first_span + span];
    Tile* tile = work_.tiles;
    Tile* next = work_.tiles + 1;
    for (int i = 0; i < visits.num_visits; ++i) {
      const AttentionVisit* visit = plan_.visits + visits.first_visit + i;
      if (i == 0) locate(*visit, head_, *tile);
      const bool is_fetched = locate_following(span, i + 1, *next);
      attend_tile(*visit, *tile, is_fetched ? next : nullptr, state);
      Tile* const done = tile;
      tile = next;
      next = done;
    }
  }

  // Finds the tile that this thread will most likely want after visit `visit - 1` of a span: short contexts have few tiles,
  // so the first one of the next block or head counts too. False if there is none.
  bool locate_following(int span, int visit, Tile& tile) const {
    const AttentionSpan& visits = plan_.spans[block_.first_span + span];
    int64_t block = &block_ - plan_.blocks, head = head_;
    if (visit < visits.num_visits) {
      locate(plan_.visits[visits.first_visit + visit], head, tile);
      return true;
    }
    int64_t next_span = block_.first_span + span + 1;
    if (span + 1 == block_.num_spans) {
      if (++block == plan_.num_blocks) {
        block = 0;
        ++head;
      }
      if (head == kv_.num_kv_heads) return false;
      next_span = plan_.blocks[block].first_span;
    }
    locate(plan_.visits[plan_.spans[next_span].first_visit], head, tile);
    return true;
  }

  void attend_tile(const AttentionVisit& visit, const Tile& tile, const Tile* next, const State& state) {
    Ahead ahead{nullptr, 0, 0};
    if (next != nullptr) ahead = {next->rows[0], 2 * kTileTokens, head_dim_ * static_cast<int64_t>(sizeof(T))};
    pack_keys<Path, T>(tile, ahead, visit.first_key, visit.end_key, head_dim_, work_.keys);
    pack_values<Path, T>(tile, ahead, visit.first_key, visit.end_key, head_dim_, work_.values);
    constexpr bool kIsScaled = sizeof(T) == 1;
    const float* key_scales = kIsScaled ? tile.key_scales : nullptr;
    const float* value_scales = kIsScaled ? tile.value_scales : nullptr;
    Number* weights = reinterpret_cast<Number*>(work_.weights);
    const int64_t end_row = static_cast<int64_t>(visit.first_token + visit.num_tokens) * plan_.group;
    for (int64_t row = static_cast<int64_t>(visit.first_token) * plan_.group; row < end_row; row += kChunkRows) {
      const int count = static_cast<int>(smaller(kChunkRows, end_row - row));
      score<Path>(count, reinterpret_cast<const Number*>(work_.query) + row * head_dim_, head_dim_, work_.keys, work_.scores, ahead);
      float factors[kChunkRows];
      int first_seen = kTileTokens, last_seen = 0;
      for (int i = 0; i < count; ++i) {
        int first, last;
        limits(visit, row + i, &first, &last);
        first_seen = first < first_seen ? first : first_seen;
        last_seen = last > last_seen ? last : last_seen;
        f32x16 scores[kTileVectors];
        finish_scores(call_, work_.scores + i * kTileTokens, key_scales, first, last, scores);
        factors[i] = weigh(scores, value_scales, state.best + row + i, state.sums + (row + i) * kLanes, weights + i * kTileTokens);
      }
      add_values<Path>(count, weights, factors, work_.values, first_seen, last_seen + 1, head_dim_,
                       state.totals + row * head_dim_, ahead);
    }
  }

  template <class To>
  void write_rows(To* to) const {
    const State& state = work_.merged;
    const int64_t num_heads = kv_.num_kv_heads * plan_.group;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t query_head = head_ * plan_.group + row % plan_.group;
      float sum = sum_of_lanes(load(state.sums + row * kLanes));
      float best = state.best[row];
      float factor = 1.0f;
      if (call_.sinks != nullptr) {
        const float sink = call_.sinks[query_head];
        if (sink > best) {
          factor = exp(splat(best - sink))[0];
          best = sink;
        }
        sum = sum * factor;
        sum = sum + exp(splat(sink - best))[0];
      }
      const f32x16 scale = splat(factor / sum);
      const int64_t place = token_of(row).row * num_heads + query_head;
      for (int64_t i = 0; i < head_dim_; i += kLanes) {
        store(to + place * head_dim_ + i, load(state.totals + row * head_dim_ + i) * scale);
      }
      if (call_.key_scores != nullptr) {
        float* normalizers = reinterpret_cast<float*>(call_.scratch + layout_.normalizers) + 2 * place;
        normalizers[0] = best;
        normalizers[1] = 1.0f / sum;
      }
    }
  }

  void finish() const {
    switch (call_.query_type) {
      case DType::kBFloat16: return write_rows(static_cast<bf16*>(call_.out));
      case DType::kFloat16: return write_rows(static_cast<fp16*>(call_.out));
      default: return write_rows(static_cast<float*>(call_.out));
    }
  }

  void score_keys_of(int64_t index) {
    const AttentionVisit& visit = plan_.visits[index];
    Tile& tile = work_.tiles[0];
    locate(visit, head_, tile);
    Ahead nothing{nullptr, 0, 0};
    pack_keys<Path, T>(tile, nothing, visit.first_key, visit.end_key, head_dim_, work_.keys);
    const float* key_scales = sizeof(T) == 1 ? tile.key_scales : nullptr;
    const float* normalizers = reinterpret_cast<const float*>(call_.scratch + layout_.normalizers);
    const int64_t num_heads = kv_.num_kv_heads * plan_.group;
    f32x16 sums[kTileVectors] = {};
    const int64_t end_row = static_cast<int64_t>(visit.first_token + visit.num_tokens) * plan_.group;
    for (int64_t row = static_cast<int64_t>(visit.first_token) * plan_.group; row < end_row; row += kChunkRows) {
      const int count = static_cast<int>(smaller(kChunkRows, end_row - row));
      score<Path>(count, reinterpret_cast<const Number*>(work_.query) + row * head_dim_, head_dim_, work_.keys, work_.scores, nothing);
      for (int i = 0; i < count; ++i) {
        int first, last;
        limits(visit, row + i, &first, &last);
        f32x16 scores[kTileVectors];
        finish_scores(call_, work_.scores + i * kTileTokens, key_scales, first, last, scores);
        const int64_t place = token_of(row + i).row * num_heads + head_ * plan_.group + (row + i) % plan_.group;
        const float best = normalizers[2 * place], inverse = normalizers[2 * place + 1];
        for (int j = 0; j < kTileVectors; ++j) sums[j] = sums[j] + exp(scores[j] - best) * inverse;
      }
    }
    float* to = reinterpret_cast<float*>(call_.scratch + layout_.visit_scores) + index * kTileTokens;
    for (int i = 0; i < kTileVectors; ++i) store(to + i * kLanes, sums[i]);
  }

  const AttentionCall& call_;
  const AttentionPlan& plan_;
  const KVLayer& kv_;
  const Layout& layout_;
  const RowBlock& block_;
  const int64_t head_;
  int64_t num_rows_;
  int64_t head_dim_;
  Workspace work_;
};

// -- all of it ----------------------------------------------------------------------------------------------------------------

struct SpanTask {
  int64_t block;
  int span;
};

// In the order of visits, head after head, by one thread: several visits may be of the same keys.
void add_key_scores(const AttentionCall& call, const Layout& layout) {
  const AttentionPlan& plan = *call.plan;
  const float* from = reinterpret_cast<const float*>(call.scratch + layout.visit_scores);
  for (int64_t index = 0; index < plan.num_visits; ++index, from += kTileTokens) {
    const AttentionVisit& visit = plan.visits[index];
    const int32_t* table = plan.block_tables + visit.sequence * plan.table_stride;
    for (int key = visit.first_key; key < visit.end_key; ++key) {
      const int64_t position = static_cast<int64_t>(visit.tile) * kTileTokens + key;
      const int64_t block = table[position / plan.block_size];
      call.key_scores[block * plan.block_size + position % plan.block_size] += from[key];
    }
  }
}

template <class Path, class T>
void attend(const AttentionCall& call, ThreadPool& pool) {
  using Task = HeadTask<Path, T>;
  const AttentionPlan& plan = *call.plan;
  const Layout layout(call, pool.num_threads());
  const int64_t num_tasks = call.kv->num_kv_heads * plan.num_blocks;
  const auto task_of = [&](int64_t task, int thread) {
    return Task(call, layout, plan.blocks[task % plan.num_blocks], task / plan.num_blocks, thread);
  };
  if (layout.is_split) {
    parallel_for(pool, call.kv->num_kv_heads * plan.num_spans, [&](int64_t task, int thread) {
      const int64_t span = task % plan.num_spans;
      int64_t block = 0;
      while (span < plan.blocks[block].first_span || span >= plan.blocks[block].first_span + plan.blocks[block].num_spans) ++block;
      Task(call, layout, plan.blocks[block], task / plan.num_spans, thread)
          .attend_part(static_cast<int>(span - plan.blocks[block].first_span));
    });
    parallel_for(pool, num_tasks, [&](int64_t task, int thread) { task_of(task, thread).merge_parts(); });
  } else {
    parallel_for(pool, num_tasks, [&](int64_t task, int thread) { task_of(task, thread).attend(); });
  }
  if (call.key_scores == nullptr) return;
  for (int64_t head = 0; head < call.kv->num_kv_heads; ++head) {
    parallel_for(pool, plan.num_blocks,
                 [&](int64_t block, int thread) { Task(call, layout, plan.blocks[block], head, thread).score_keys(); });
    add_key_scores(call, layout);
  }
}

}  // namespace

int64_t attention_scratch(const AttentionCall& call, int num_threads) { return Layout(call, num_threads).total; }

void attention(const AttentionCall& call, ThreadPool& pool) {
#if defined(__AVX512BF16__)
  if (call.query_type == DType::kBFloat16) {
    if (call.kv->type == DType::kBFloat16) return attend<BFloat16Path, bf16>(call, pool);
    if (call.kv->type == DType::kInt8) return attend<BFloat16Path, int8_t>(call, pool);
  }
#endif
  switch (call.kv->type) {
    case DType::kBFloat16: return attend<Float32Path, bf16>(call, pool);
    case DType::kFloat16: return attend<Float32Path, fp16>(call, pool);
    case DType::kInt8: return attend<Float32Path, int8_t>(call, pool);
    default: return attend<Float32Path, float>(call, pool);
  }
}

}  // namespace quire::QUIRE_ISA
