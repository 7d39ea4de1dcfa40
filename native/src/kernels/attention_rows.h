// The rows that one KV head of a row block has, and where in the cache the keys and values lie that they see. Compiled once for
// each instruction set.
#pragma once

#include "attention.h"
#include "attention_tiles.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

alignas(64) constexpr char kZeros[kMaxHeadDim * sizeof(float)] = {};

// Row `i` is head `i % group` of those that have rows, for token `i / group` of the block.
struct HeadRows {
  const AttentionCall& call;
  const AttentionPlan& plan;
  const KVLayer& kv;
  const RowBlock& block;
  int64_t head;
  int64_t head_dim;
  int64_t value_dim;
  int64_t group;  // query heads that have rows

  HeadRows(const AttentionCall& the_call, const RowBlock& the_block, int64_t the_head)
      : call(the_call),
        plan(*the_call.plan),
        kv(*the_call.kv),
        block(the_block),
        head(the_head),
        head_dim(kv.head_dim),
        value_dim(kv.value_dim),
        group(the_block.query_head == kAllHeads ? plan.group : 1) {}

  int64_t count() const { return static_cast<int64_t>(block.num_tokens) * group; }
  int64_t first_row(const AttentionVisit& visit) const { return static_cast<int64_t>(visit.first_token) * group; }
  int64_t end_row(const AttentionVisit& visit) const { return first_row(visit) + static_cast<int64_t>(visit.num_tokens) * group; }
  const AttentionSpan& span(int index) const { return plan.spans[block.first_span + index]; }

  const AttentionToken& token_of(int64_t row) const { return plan.tokens[block.first_token + row / group]; }
  int64_t query_head(int64_t row) const {
    return block.query_head == kAllHeads ? head * plan.group + row % plan.group : block.query_head;
  }
  // Among the rows of all heads and tokens: that of the row's result.
  int64_t place(int64_t row) const { return token_of(row).row * kv.num_kv_heads * plan.group + query_head(row); }

  // The first and the last key of a tile that a row sees.
  QUIRE_INLINE void limits(const AttentionVisit& visit, int64_t row, int* first, int* last) const {
    const int64_t position = token_of(row).position - static_cast<int64_t>(visit.tile) * kTileTokens;
    const int64_t oldest = plan.window == 0 ? 0 : position - plan.window + 1;
    *first = oldest > visit.first_key ? static_cast<int>(oldest) : visit.first_key;
    *last = static_cast<int>(min(position, visit.end_key - 1));
  }

  // The keys of a tile that some of `count` rows see, which may be of several sequences.
  QUIRE_INLINE Seen seen(const AttentionVisit& visit, int64_t first_row, int count) const {
    Seen seen{kTileTokens, 0};
    for (int64_t row = first_row; row < first_row + count; ++row) {
      int first, last;
      limits(visit, row, &first, &last);
      seen.first = first < seen.first ? first : seen.first;
      seen.end = last + 1 > seen.end ? last + 1 : seen.end;
    }
    return seen;
  }

  // Puts the queries in `to`, [count, head_dim], as the numbers that products are computed in. `query_rows`: [count].
  template <class Number>
  void take_query(Number* to, QueryRow* query_rows) const {
    switch (call.query_type) {
      case DType::kBFloat16: return take_query_from(static_cast<const bf16*>(call.query), to, query_rows);
      case DType::kFloat16: return take_query_from(static_cast<const fp16*>(call.query), to, query_rows);
      default: return take_query_from(static_cast<const float*>(call.query), to, query_rows);
    }
  }

  // Where the keys and values of a visit lie in a cache of T; scales are fetched only. `of_head`: the KV head, this or another.
  template <class T>
  void locate(const AttentionVisit& visit, int64_t of_head, Tile& tile) const {
    for (int key = 0; key < kTileTokens; ++key) {
      if (key == visit.first_key) key = visit.end_key;
      if (key >= kTileTokens) break;
      tile.rows[0][key] = tile.rows[1][key] = kZeros;
    }
    const int32_t* table = plan.block_tables + visit.sequence * plan.table_stride;
    const int64_t start = static_cast<int64_t>(visit.tile) * kTileTokens;
    int64_t entry = (start + visit.first_key) / plan.block_size, offset = (start + visit.first_key) % plan.block_size;
    tile.num_pieces = 0;
    for (int key = visit.first_key; key < visit.end_key; ++entry, offset = 0) {
      const int count = static_cast<int>(min(plan.block_size - offset, visit.end_key - key));
      const float* key_scales = locate_piece<T>(kv.keys, of_head, table[entry], offset, count, tile.rows[0] + key);
      const float* value_scales = locate_piece<T>(kv.values, of_head, table[entry], offset, count, tile.rows[1] + key);
      tile.pieces[tile.num_pieces++] = {key, count, {key_scales, value_scales}};
      key += count;
    }
  }

  // Takes the scales of a tile that was located some time ago, so that nobody waits for them.
  void take_scales(Tile& tile) const {
    const CachePart* parts[] = {&kv.keys, &kv.values};
    for (int i = 0; i < 2 && parts[i]->scales != nullptr; ++i) {
      const int64_t stride = parts[i]->scale_strides[2];
      float* scales = tile.scales[i];
      for (int j = 0; j < kTileVectors; ++j) store(scales + j * kLanes, f32x16{});
      for (int j = 0; j < tile.num_pieces; ++j) {
        const Tile::Piece& piece = tile.pieces[j];
        for (int k = 0; k < piece.count; ++k) scales[piece.first + k] = piece.scales[i][k * stride];
      }
    }
  }

  // The tile that this thread will most likely want after visit `visit - 1` of a span: short contexts have few tiles, so the
  // first one of the next block or head counts too. False if there is none.
  template <class T>
  bool locate_following(int span_index, int visit, Tile& tile) const {
    if (visit < span(span_index).num_visits) {
      locate<T>(plan.visits[span(span_index).first_visit + visit], head, tile);
      return true;
    }
    const RowBlock* next_block = &block;
    int64_t next_head = head;
    int64_t next_span = block.first_span + span_index + 1;
    if (span_index + 1 == block.num_spans) {
      if (block.query_head != kAllHeads || ++next_head == kv.num_kv_heads) {
        ++next_block;
        if (next_block == plan.blocks + plan.num_blocks) return false;
        next_head = next_block->query_head == kAllHeads ? 0 : next_block->query_head / plan.group;
      }
      next_span = next_block->first_span;
    }
    locate<T>(plan.visits[plan.spans[next_span].first_visit], next_head, tile);
    return true;
  }

 private:
  template <class From, class Number>
  void take_query_from(const From* from, Number* to, QueryRow* query_rows) const {
    for (int64_t row = 0; row < count(); ++row, to += head_dim) {
      const From* numbers = from + token_of(row).row * call.query_stride + query_head(row) * head_dim;
      if (!kv.is_rotated()) {
        query_rows[row] = take_row(numbers, head_dim, call.scale, to);
        continue;
      }
      float rotated[kMaxHeadDim];
      rotate_into(numbers, head_dim, rotated);
      query_rows[row] = take_row(rotated, head_dim, call.scale, to);
    }
  }

  // Returns where the scales are, or null.
  template <class T>
  QUIRE_INLINE const float* locate_piece(const CachePart& part, int64_t of_head, int64_t entry, int64_t offset, int count,
                                         const char** rows) const {
    const int64_t token_bytes = part.strides[2] * static_cast<int64_t>(sizeof(T));
    const char* row = static_cast<const char*>(part.numbers) +
                      (entry * part.strides[0] + of_head * part.strides[1]) * static_cast<int64_t>(sizeof(T)) +
                      offset * token_bytes;
    for (int i = 0; i < count; ++i) rows[i] = row + i * token_bytes;
    if (part.scales == nullptr) return nullptr;
    const int64_t stride = part.scale_strides[2];
    const float* scales = part.scales + entry * part.scale_strides[0] + of_head * part.scale_strides[1] + offset * stride;
    const char *first = reinterpret_cast<const char*>(scales),
               *last = reinterpret_cast<const char*>(scales + (count - 1) * stride);
    for (const char* at = first; at < last; at += kLine) __builtin_prefetch(at);
    __builtin_prefetch(last);
    return scales;
  }
};

}  // namespace quire::QUIRE_ISA
