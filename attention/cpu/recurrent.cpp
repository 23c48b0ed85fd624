// The gated delta rule over rows of states, and the convolution before it, as attention/recurrent.py defines them.
//
// A state [V, K] of a head is advanced token by token, or by a piece of up to PIECE tokens at once. For the latter it
// is turned into panels of NR values, [V / NR, K, NR]. The values of a state do not depend on each other, so each panel
// is advanced by itself, and stays in the first cache meanwhile. Queries, keys and values are stored in float32,
// bfloat16 or float16 and computed in float32.
//
// Each number is one chain of operations, whose order depends on the number's place in its piece and on nothing else:
// not on what lies beside it, on the number of threads or on the heads that a rank has.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int ROWS = 4;  // 8 sums, 2 vectors and 4 factors in 16 registers
#else
constexpr int ROWS = 8;  // 16 sums, 2 vectors and 8 factors in 32 registers
#endif
constexpr int VECTORS = 2, NR = LANES * VECTORS;
// Tokens of the longest piece. It divides GRID of kv_cache/states.py, at whose multiples states are the same however a
// prompt is cut. Half of it takes a seventh less time: work between tokens of a piece grows with its length.
constexpr long PIECE = 32;
constexpr long SHORT = 8;  // tokens of the longest piece that advances token by token: SHORT of attention/recurrent.py
constexpr long TILE = 16;  // tokens whose decays by channel are computed pair by pair: TILE of the same
constexpr long NULL_PAGE = 0;  // NULL_PAGE of kv_cache/pages.py
constexpr float LEAST_SQUARE = 1e-6f;
constexpr long COLUMNS = (PIECE + NR - 1) / NR;  // panels of a piece's tokens

inline long rounded(long count, long step) { return (count + step - 1) / step * step; }

// Sum the lanes in pairs, whose order is always the same.
inline float folded(Vec v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

template <Kind KIND>
void widen_row_of(const void* row_, long count, float* to) {
    const auto* row = static_cast<const typename Stored<KIND>::Item*>(row_);
    for (long i = 0; i < count; i += LANES)
        narrow_some<FLOAT32>(to + i, widen_some<KIND>(row + i, count - i), count - i);
}

template <Kind KIND>
void narrow_row_of(const float* from, long count, void* row_) {
    auto* row = static_cast<typename Stored<KIND>::Item*>(row_);
    for (long i = 0; i < count; i += LANES)
        narrow_some<KIND>(row + i, widen_some<FLOAT32>(from + i, count - i), count - i);
}

inline long bytes_of(int kind) { return kind == FLOAT32 ? 4 : 2; }

inline const void* at(const void* items, long index, int kind) {
    return static_cast<const char*>(items) + index * bytes_of(kind);
}

inline void* at(void* items, long index, int kind) { return static_cast<char*>(items) + index * bytes_of(kind); }

void widen_row(const void* items, long index, int kind, long count, float* to) {
    auto* of_kind = kind == FLOAT32    ? widen_row_of<FLOAT32>
                    : kind == BFLOAT16 ? widen_row_of<BFLOAT16>
                                       : widen_row_of<FLOAT16>;
    of_kind(at(items, index, kind), count, to);
}

void narrow_row(const float* from, long count, void* items, long index, int kind) {
    auto* of_kind = kind == FLOAT32    ? narrow_row_of<FLOAT32>
                    : kind == BFLOAT16 ? narrow_row_of<BFLOAT16>
                                       : narrow_row_of<FLOAT16>;
    of_kind(from, count, at(items, index, kind));
}

// Adds R rows of factors [R, num] times `num` rows [num, NR] to the sums [R, NR]; factors have two strides.
template <int R>
void tile(const float* a, long row_stride, long stride, const float* b, long num, float* y, long y_stride) {
    Vec sums[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(y + r * y_stride + v * LANES);
    for (long k = 0; k < num; k++) {
        Vec w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = load(b + k * NR + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const float factor = a[r * row_stride + k * stride];
            for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * w[v];  // contracted to fused multiply-adds
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(y + r * y_stride + v * LANES, sums[r][v]);
}

template <int R = ROWS>
void tile_of(long rows, const float* a, long row_stride, long stride, const float* b, long num, float* y,
             long y_stride) {
    if (rows >= R)
        tile<R>(a, row_stride, stride, b, num, y, y_stride);
    else if constexpr (R > 1)
        tile_of<R - 1>(rows, a, row_stride, stride, b, num, y, y_stride);
}

void multiply(long rows, const float* a, long row_stride, long stride, const float* b, long num, float* y,
              long y_stride) {
    for (long r = 0; r < rows; r += ROWS)
        tile_of(rows - r, a + r * row_stride, row_stride, stride, b, num, y + r * y_stride, y_stride);
}

// What a layer projects of T tokens, and its states; the strides are those of tokens, in items.
struct Rule {
    const void *query, *key, *value;  // [T, J, K], [T, J, K], [T, H, V]
    const float* decay;               // logarithms, [T, H] or [T, H, K]
    const void* beta;                 // [T, H]
    void *states, *output;            // [P, H, V, K], [T, H, V]
    long query_stride, key_stride, value_stride;
    long key_heads, heads, key_dim, value_dim;
    int kind, state_kind;
    bool by_channel, by_token;  // `by_token` advances any piece token by token

    long key_room() const { return rounded(key_dim, LANES); }
    long panels() const { return (value_dim + NR - 1) / NR; }
    long panels_room() const { return panels() * key_dim * NR; }
    long shared() const { return heads / key_heads; }
};

struct Span {
    int64_t first_row, start, stop, source, target;
};

// Hands out parts of one allocation, each from a line of the cache on.
struct Room {
    float* next;
    float* take(long count) {
        float* taken = next;
        next += rounded(count, 16);
        return taken;
    }
};

// The memory in which one thread computes. Rows of K numbers are followed by zeros up to a whole vector.
struct Work {
    float *query, *key;          // [PIECE, K]
    float *decayed, *lasting;    // keys, then queries, decayed since the piece's start [2 PIECE, K]; keys until its end
    float *total, *last;         // sums of logarithms [PIECE, K], decay of the whole piece [K]
    float *turned, *turned_total;  // keys and sums of logarithms [COLUMNS, K, NR]
    float *columns;              // keys decayed until a tile [COLUMNS, K, NR]
    float *raw, *products;       // of keys, then queries, with keys [2 PIECE, COLUMNS NR]: plain, and decayed
    float *reads, *written;      // [2 PIECE, NR], [PIECE, NR]
    float *beta, *row, *values;  // [PIECE], a row of values, [PIECE, V / NR, NR]
    float *rows, *panels;        // states of the value heads of a key head: [V, K], [V / NR, K, NR]

    static long size(const Rule& of) {
        const long keys = of.key_room(), turned = COLUMNS * keys * NR, values = rounded(of.value_dim, NR);
        return PIECE * keys * 6 + keys + turned * 3 + 4 * PIECE * COLUMNS * NR + 3 * PIECE * NR + PIECE +
               values * (1 + PIECE) + of.shared() * (of.value_dim * of.key_dim + of.panels_room()) + 18 * 16;
    }

    Work(const Rule& of, float* all) {
        const long keys = of.key_room(), turned_size = COLUMNS * keys * NR;
        Room room = {all};
        query = room.take(PIECE * keys), key = room.take(PIECE * keys);
        decayed = room.take(2 * PIECE * keys), lasting = room.take(PIECE * keys);
        total = room.take(PIECE * keys), last = room.take(keys);
        turned = room.take(turned_size), turned_total = room.take(turned_size), columns = room.take(turned_size);
        raw = room.take(2 * PIECE * COLUMNS * NR), products = room.take(2 * PIECE * COLUMNS * NR);
        reads = room.take(2 * PIECE * NR), written = room.take(PIECE * NR);
        beta = room.take(PIECE), row = room.take(rounded(of.value_dim, NR));
        values = room.take(PIECE * rounded(of.value_dim, NR));
        rows = room.take(of.shared() * of.value_dim * of.key_dim);
        panels = room.take(of.shared() * of.panels_room());
    }
};

constexpr long WIDE = COLUMNS * NR;  // numbers of a row of products

// A vector of length one in the direction of a query or key, times `scale`, with zeros up to a whole vector.
void unit(const Rule& of, const void* items, long index, float scale, float* to) {
    const long keys = of.key_room();
    std::memset(to + of.key_dim, 0, sizeof(float) * (keys - of.key_dim));
    widen_row(items, index, of.kind, of.key_dim, to);
    Vec squares = {};
    for (long k = 0; k < keys; k += LANES) squares += load(to + k) * load(to + k);
    const float factor = scale / std::sqrt(folded(squares) + LEAST_SQUARE);
    for (long k = 0; k < keys; k += LANES) store(to + k, load(to + k) * factor);
}

void units(const Rule& of, long token, long key_head, long count, Work& work) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(of.key_dim));
    for (long i = 0; i < count; i++) {
        const long within = key_head * of.key_dim, row = i * of.key_room();
        unit(of, of.query, (token + i) * of.query_stride + within, scale, work.query + row);
        unit(of, of.key, (token + i) * of.key_stride + within, 1.0f, work.key + row);
    }
}

// The logarithms of a token's decays, one for each channel, and zeros up to a whole vector.
void logarithms(const Rule& of, long token, long head, float* to) {
    const long keys = of.key_room();
    if (!of.by_channel) {
        std::fill(to, to + keys, of.decay[token * of.heads + head]);
        return;
    }
    std::memset(to + of.key_dim, 0, sizeof(float) * (keys - of.key_dim));
    std::memcpy(to, of.decay + (token * of.heads + head) * of.key_dim, sizeof(float) * of.key_dim);
}

inline float beta_of(const Rule& of, long token, long head) {
    float beta;
    widen_row(of.beta, token * of.heads + head, of.kind, 1, &beta);
    return beta;
}

// Advance a state [V, K] by one token, whose query and key are at `i`.
void step(const Rule& of, long token, long i, long head, float* state, Work& work) {
    const long keys = of.key_room(), width = of.key_dim;
    const float *query = work.query + i * keys, *key = work.key + i * keys;
    logarithms(of, token, head, work.last);
    for (long k = 0; k < keys; k += LANES) store(work.last + k, exponential(load(work.last + k)));
    widen_row(of.value, token * of.value_stride + head * of.value_dim, of.kind, of.value_dim, work.row);
    const float beta = beta_of(of, token, head);
    for (long v = 0; v < of.value_dim; v++) {
        float* row = state + v * width;
        Vec found = {}, read = {};
        for (long k = 0; k < width; k += LANES)
            found += widen_some<FLOAT32>(row + k, width - k) * load(work.last + k) * load(key + k);
        const float written = beta * (work.row[v] - folded(found));
        for (long k = 0; k < width; k += LANES) {
            const Vec now = widen_some<FLOAT32>(row + k, width - k) * load(work.last + k) + written * load(key + k);
            narrow_some<FLOAT32>(row + k, now, width - k);
            read += now * load(query + k);
        }
        work.row[v] = folded(read);
    }
    narrow_row(work.row, of.value_dim, of.output, (token * of.heads + head) * of.value_dim, of.kind);
}

// Write the columns of `from` [count, width] to rows `to` [width, room], with zeros behind `count`.
void write_columns(const float* from, long stride, long count, long width, float* to, long to_stride, long room) {
    for (long i = 0; i < room; i += LANES)
        for (long k = 0; k < width; k += LANES) {
            Vec square[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                square[r] = i + r < count ? widen_some<FLOAT32>(from + (i + r) * stride + k, width - k) : Vec{};
            turn_square(square);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                if (k + c < width) narrow_some<FLOAT32>(to + (k + c) * to_stride + i, square[c], room - i);
        }
}

// Turn n rows of K numbers into panels of their columns [COLUMNS, K, NR], with zeros behind the last row.
void turn(const Rule& of, const float* rows, long count, float* turned) {
    const long keys = of.key_room();
    for (long first = 0; first < PIECE; first += NR)
        write_columns(rows + first * keys, keys, count - first, keys, turned + first * keys, NR, NR);
}

// Products of the piece's keys and queries with its keys up to them, which all value heads of a key head share.
void plain_products(const Rule& of, long count, Work& work) {
    const long keys = of.key_room();
    turn(of, work.key, count, work.turned);
    std::memset(work.raw, 0, sizeof(float) * 2 * PIECE * WIDE);
    for (long first = 0; first < count; first += NR)
        for (long half = 0; half < 2; half++)
            multiply(count - first, (half ? work.query : work.key) + first * keys, keys, 1, work.turned + first * keys,
                     of.key_dim, work.raw + (half * PIECE + first) * WIDE + first, WIDE);
}

// Decay of tokens by one factor for each: products, keys and queries.
void decay_by_head(const Rule& of, long token, long head, long count, Work& work) {
    const long keys = of.key_room();
    float total[WIDE] = {}, decays[WIDE], lasting[WIDE];
    for (long i = 0; i < count; i++) total[i] = (i ? total[i - 1] : 0.0f) + of.decay[(token + i) * of.heads + head];
    const float end = total[count - 1];
    for (long j = 0; j < WIDE; j += LANES) {
        store(decays + j, exponential(load(total + j)));
        store(lasting + j, exponential(end - load(total + j)));
    }
    for (long i = 0; i < count; i++) {
        for (long j = 0; j <= i; j += LANES) {
            const Vec between = exponential(total[i] - load(total + j));
            for (long half = 0; half < 2; half++) {
                const long place = (half * PIECE + i) * WIDE + j;
                store(work.products + place, load(work.raw + place) * between);
            }
        }
        for (long k = 0; k < keys; k += LANES) {
            const Vec key = load(work.key + i * keys + k);
            store(work.decayed + i * keys + k, key * decays[i]);
            store(work.decayed + (count + i) * keys + k, load(work.query + i * keys + k) * decays[i]);
            store(work.lasting + i * keys + k, key * lasting[i]);
        }
    }
    std::fill(work.last, work.last + keys, decays[count - 1]);
}

// Products of the tokens of a tile with those of the tiles before it: both decay to and from where the tile begins.
void products_between_tiles(const Rule& of, long first, long count, Work& work) {
    const long keys = of.key_room(), rows = std::min(TILE, count - first);
    const float* since = work.total + first * keys;
    for (long c = 0; c * NR < first; c++)
        for (long k = 0; k < of.key_dim; k++)
            for (long v = 0; v < NR; v += LANES) {
                const long place = (c * keys + k) * NR + v;
                store(work.columns + place,
                      load(work.turned + place) * exponential(since[k] - load(work.turned_total + place)));
            }
    for (long half = 0; half < 2; half++) {
        const float* from = half ? work.query : work.key;
        for (long i = 0; i < rows; i++)
            for (long k = 0; k < keys; k += LANES) {
                const long place = (first + i) * keys + k;
                const Vec decay = exponential(load(work.total + place) - load(since + k));
                store(work.lasting + i * keys + k, load(from + place) * decay);
            }
        for (long c = 0; c * NR < first; c++)
            multiply(rows, work.lasting, keys, 1, work.columns + c * keys * NR, of.key_dim,
                     work.products + (half * PIECE + first) * WIDE + c * NR, WIDE);
    }
}

// Decay of tokens by a factor for each channel: products, keys and queries.
void decay_by_channel(const Rule& of, long token, long head, long count, Work& work) {
    const long keys = of.key_room();
    for (long i = 0; i < count; i++) {
        float* total = work.total + i * keys;
        logarithms(of, token + i, head, total);
        for (long k = 0; i && k < keys; k += LANES) store(total + k, load(total + k) + load(total + k - keys));
    }
    turn(of, work.total, count, work.turned_total);
    std::memset(work.products, 0, sizeof(float) * 2 * PIECE * WIDE);
    for (long first = 0; first < count; first += TILE) {
        if (first) products_between_tiles(of, first, count, work);
        for (long i = first; i < std::min(first + TILE, count); i++)
            for (long j = first; j <= i; j++) {
                Vec found = {}, seen = {};
                for (long k = 0; k < keys; k += LANES) {
                    const Vec between = exponential(load(work.total + i * keys + k) - load(work.total + j * keys + k));
                    const Vec key = load(work.key + j * keys + k) * between;
                    found += load(work.key + i * keys + k) * key;
                    seen += load(work.query + i * keys + k) * key;
                }
                work.products[i * WIDE + j] = folded(found), work.products[(PIECE + i) * WIDE + j] = folded(seen);
            }
    }
    const float* end = work.total + (count - 1) * keys;
    for (long k = 0; k < keys; k += LANES) store(work.last + k, exponential(load(end + k)));
    for (long i = 0; i < count; i++)
        for (long k = 0; k < keys; k += LANES) {
            const long place = i * keys + k;
            const Vec total = load(work.total + place), decay = exponential(total), key = load(work.key + place);
            store(work.decayed + place, key * decay);
            store(work.decayed + count * keys + place, load(work.query + place) * decay);
            store(work.lasting + place, key * exponential(load(end + k) - total));
        }
}

// Solves the triangular system of what the tokens write: each subtracts what its key finds of those before it. The last
// tile may have rows behind the last token; these get any numbers, and nobody reads them.
void solve(long count, const float* below, float* written) {
    for (long first = 0; first < count; first += ROWS) {
        const float* factors = below + first * WIDE;
        float* own = written + first * NR;
        tile_of(std::min<long>(ROWS, count - first), factors, WIDE, 1, written, first, own, NR);
        Vec rows[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            for (int v = 0; v < VECTORS; v++) rows[i][v] = load(own + i * NR + v * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < i; j++)
                for (int v = 0; v < VECTORS; v++) rows[i][v] += factors[i * WIDE + first + j] * rows[j][v];
            for (int v = 0; v < VECTORS; v++) store(own + i * NR + v * LANES, rows[i][v]);
        }
    }
}

// Advance one panel [K, NR] of a state by the piece's tokens, of whose values it has those from `first` on.
void advance_panel(const Rule& of, long token, long head, long count, long first, float* panel, Work& work) {
    const long keys = of.key_room(), width = std::min<long>(NR, of.value_dim - first), values = of.panels() * NR;
    std::memset(work.reads, 0, sizeof(float) * 2 * count * NR);
    multiply(2 * count, work.decayed, keys, 1, panel, of.key_dim, work.reads, NR);
    for (long i = 0; i < count; i++)
        for (int v = 0; v < NR; v += LANES) {
            const Vec value = load(work.values + i * values + first + v);
            store(work.written + i * NR + v, work.beta[i] * (value - load(work.reads + i * NR + v)));
        }
    solve(count, work.products, work.written);
    for (long i = 0; i < count; i += ROWS) {
        const long rows = std::min<long>(ROWS, count - i);
        tile_of(rows, work.products + (PIECE + i) * WIDE, WIDE, 1, work.written, i + rows,
                work.reads + (count + i) * NR, NR);
    }
    for (long i = 0; i < count; i++)
        narrow_row(work.reads + (count + i) * NR, width, of.output,
                   ((token + i) * of.heads + head) * of.value_dim + first, of.kind);
    for (long k = 0; k < of.key_dim; k++)
        for (int v = 0; v < NR; v += LANES) store(panel + k * NR + v, load(panel + k * NR + v) * work.last[k]);
    multiply(of.key_dim, work.lasting, 1, keys, work.written, count, panel, NR);
}

// Advance the states of all value heads of a key head by a piece of tokens.
void block(const Rule& of, long token, long key_head, long count, Work& work) {
    units(of, token, key_head, count, work);
    if (of.by_channel)
        turn(of, work.key, count, work.turned);
    else
        plain_products(of, count, work);
    for (long each = 0; each < of.shared(); each++) {
        const long head = key_head * of.shared() + each;
        (of.by_channel ? decay_by_channel : decay_by_head)(of, token, head, count, work);
        const long values = of.panels() * NR;
        for (long i = 0; i < count; i++) {
            const float beta = beta_of(of, token + i, head);
            work.beta[i] = beta;
            widen_row(of.value, (token + i) * of.value_stride + head * of.value_dim, of.kind, of.value_dim,
                      work.values + i * values);
            float *found = work.products + i * WIDE, *seen = work.products + (PIECE + i) * WIDE;
            for (long j = 0; j < i; j += LANES) store(found + j, load(found + j) * -beta);
            std::memset(found + i, 0, sizeof(float) * (WIDE - i));
            std::memset(seen + i + 1, 0, sizeof(float) * (WIDE - i - 1));
        }
        float* panels = work.panels + each * of.panels_room();
        for (long p = 0; p < of.panels(); p++)
            advance_panel(of, token, head, count, p * NR, panels + p * of.key_dim * NR, work);
    }
}

void to_panels(const Rule& of, const float* rows, float* panels) {
    const long width = of.key_dim;
    for (long v = 0; v < of.value_dim; v += NR)
        write_columns(rows + v * width, width, of.value_dim - v, width, panels + v * width, NR, NR);
}

void to_rows(const Rule& of, const float* panels, float* rows) {
    const long width = of.key_dim;
    for (long v = 0; v < of.value_dim; v += NR)
        write_columns(panels + v * width, NR, width, std::min<long>(NR, of.value_dim - v), rows + v * width, width,
                      width);
}

// Advance the states of all value heads of a key head by a span. The states lie in rows while single tokens advance
// them, in the cache itself where that is of float32, and in panels while pieces do. A span whose state is not kept, as
// with drafts, has the null page as its target; it advances a copy, because several threads have that target at once.
void advance_span(const Rule& of, const Span& span, long key_head, Work& work) {
    const long size = of.value_dim * of.key_dim, first = key_head * of.shared(), all = of.shared() * size;
    const long from = (span.source * of.heads + first) * size, to = (span.target * of.heads + first) * size;
    const bool is_kept = span.target != NULL_PAGE, is_there = is_kept && of.state_kind == FLOAT32;
    float* rows = is_there ? static_cast<float*>(of.states) + to : work.rows;
    if (!span.start)
        std::memset(rows, 0, sizeof(float) * all);
    else if (!is_there || span.source != span.target)
        widen_row(of.states, from, of.state_kind, all, rows);
    bool in_panels = false;
    const auto turn_each = [&](bool into_panels) {
        for (long each = 0; in_panels != into_panels && each < of.shared(); each++) {
            float *panels = work.panels + each * of.panels_room(), *own = rows + each * size;
            into_panels ? to_panels(of, own, panels) : to_rows(of, panels, own);
        }
        in_panels = into_panels;
    };
    for (long position = span.start, end; position < span.stop; position = end) {
        end = std::min<long>(span.stop, position / PIECE * PIECE + PIECE);
        const long token = span.first_row + position - span.start, count = end - position;
        const bool is_block = count > SHORT && !of.by_token;
        turn_each(is_block);
        if (is_block) {
            block(of, token, key_head, count, work);
            continue;
        }
        units(of, token, key_head, count, work);
        for (long i = 0; i < count; i++)
            for (long each = 0; each < of.shared(); each++)
                step(of, token + i, i, first + each, rows + each * size, work);
    }
    turn_each(false);
    if (is_kept && !is_there) narrow_row(rows, all, of.states, to, of.state_kind);
}

// A span that goes on from what the one before it leaves follows it on the same thread.
inline bool follows(const Span* spans, long index) {
    return index && spans[index].start && spans[index].source == spans[index - 1].target;
}

// Convolve channels from `first` to `last` of all spans, one after the other, and keep their last inputs.
template <Kind KIND>
void convolved(const void* x_, long stride, const float* weight, void* pasts_, void* output_, const Span* spans,
               long count, long channels, long width, long first, long last) {
    typedef typename Stored<KIND>::Item Item;
    const auto* x = static_cast<const Item*>(x_);
    auto *pasts = static_cast<Item*>(pasts_), *output = static_cast<Item*>(output_);
    for (const Span* span = spans; span < spans + count; span++) {
        const long num = span->stop - span->start;
        const Item* own = x + span->first_row * stride;
        const Item* past = span->start ? pasts + span->source * (width - 1) * channels : nullptr;
        for (long t = 0; t < num; t++)
            for (long c = first; c < last; c += LANES) {
                Vec sum = {};
                for (long tap = 0; tap < width; tap++) {
                    const long place = t - (width - 1) + tap;
                    if (place < 0 && !past) continue;
                    const Item* from = place < 0 ? past + (width - 1 + place) * channels : own + place * stride;
                    const Vec tapped = widen_some<FLOAT32>(weight + tap * channels + c, last - c);
                    sum += widen_some<KIND>(from + c, last - c) * tapped;
                }
                const Vec mixed = sum / (1.0f + exponential(-sum));
                narrow_some<KIND>(output + (span->first_row + t) * channels + c, mixed, last - c);
            }
        for (long i = 0; i < width - 1; i++) {  // in this order none is overwritten before it is read
            Item* kept = pasts + (span->target * (width - 1) + i) * channels + first;
            const long place = num - (width - 1) + i, bytes = sizeof(Item) * (last - first);
            if (place >= 0)
                std::memcpy(kept, own + place * stride + first, bytes);
            else if (past)
                std::memmove(kept, past + (width - 1 + place) * channels + first, bytes);
            else
                std::memset(kept, 0, bytes);
        }
    }
}

}  // namespace

extern "C" {

// Advance the states of spans and write what their queries read; returns whether there was memory for it.
bool advance(const Rule* of, const Span* spans, long count, int num_threads) {
    bool has_memory = true;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        auto* all = static_cast<float*>(std::aligned_alloc(64, rounded(sizeof(float) * Work::size(*of), 64)));
        if (!all) {
#pragma omp atomic write
            has_memory = false;
        }
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (long s = 0; s < count; s++)
            for (long head = 0; head < of->key_heads; head++) {
                if (!all || follows(spans, s)) continue;
                Work work(*of, all);
                long each = s;
                do advance_span(*of, spans[each], head, work);
                while (++each < count && follows(spans, each));
            }
        std::free(all);
    }
    return has_memory;
}

// Convolve x [T, C] of spans with the float32 weights [W, C] to `output` [T, C], and keep last inputs [P, W - 1, C].
void convolve(const void* x, long stride, const float* weight, void* pasts, void* output, const Span* spans,
              long count, long channels, long width, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? convolved<FLOAT32> : kind == BFLOAT16 ? convolved<BFLOAT16> : convolved<FLOAT16>;
    const long part = rounded((channels + num_threads - 1) / num_threads, 16);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int t = 0; t < num_threads; t++)
        of_kind(x, stride, weight, pasts, output, spans, count, channels, width, std::min(channels, t * part),
                std::min(channels, (t + 1) * part));
}
}
