// Attention over a paged cache whose pages lie as attention/cpu/attention.py arranges them.
//
// A tile is W tokens of a page: keys [K, W / S, D, S] and values [K, D / E, W, E]. They are stored in float32,
// bfloat16, float16 or int8, and widened to float32 in registers, exactly. In int8, the numbers of each head of a tile
// are followed by the float32 scales of its W tokens; scores and weights are multiplied by these scales in place of
// keys and values. Where the processor multiplies pairs of bfloat16 itself, bfloat16 in pages is not widened: queries
// and weights are rounded to bfloat16, and products are summed in float32. Where it does so by AMX (devices/amx.h) and
// a head has a multiple of 32 channels, AMX computes prompts, and single queries are computed by vectors in the order
// of AMX.
//
// A query reads its tiles in the order of their tokens, in parts that begin at the same positions of every request, and
// the softmaxes of the parts are joined in their order. The result of a query, for a head whose keys and values are
// finite, therefore depends only on what it sees: its bits are the same in any batch, on any number of threads, and
// whether it is read alone or among the queries of a prompt. Neighbouring queries of one prompt are computed together,
// and what one of them does not see is multiplied by zero, so that keys or values that are not finite reach all of
// them.
//
// The query heads that share a head of keys and values are computed together, so that what is read is widened once for
// all of them. Neighbouring queries of a prompt share what is widened, too: it is laid aside for all of them.
//
// The compiler is given PAGES, the kind of the pages' numbers. A process reads pages of one kind, which is compiled in
// a third of the time that all kinds would take.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "amx.h"
#include "operators.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_HEADS = 8;  // 16 sums and 2 vectors in 32 registers
#elif defined(__AVX2__)
constexpr int MOST_HEADS = 4;  // 8 sums and 2 vectors in 16 registers
#else
constexpr int MOST_HEADS = 8;
#endif
constexpr Kind KIND = static_cast<Kind>(PAGES);
typedef Stored<KIND>::Item Item;
constexpr Kind NEW_KIND = KIND == INT8 ? FLOAT32 : KIND;
typedef Stored<NEW_KIND>::Item NewItem;  // queries, outputs and new keys and values; float32 where pages are int8
constexpr long SCALES = KIND == INT8 ? sizeof(float) : 0;  // items that a token's scale takes
constexpr long PART = 512;      // tokens of a part at most: their scores stay in the first cache
constexpr long STRETCH = 64;    // tokens of a prompt that are laid aside at a time: a multiple of every tile
constexpr long BLOCK = 64;      // rows, of queries and heads, that read a prompt's tiles together
constexpr long AMX_BLOCK = 192;  // the same with AMX, where laying aside takes a larger part of the time
constexpr long ROOM = 1 << 23;  // numbers that the parts of all rows take at a time: 32 MiB
constexpr long LINE = 64;       // bytes that a prefetch brings
constexpr long FEW_TOKENS = 32;  // up to so many tokens are written as fast by one thread as by several
constexpr float LEAST = -std::numeric_limits<float>::infinity();

inline long thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

constexpr long IN_A_LINE = LINE / sizeof(float);
inline long whole(long count, long step) { return (count + step - 1) / step * step; }
inline long whole_lines(long numbers) { return whole(numbers, IN_A_LINE); }

// Allocates numbers from the start of a cache line on, so that each of their vectors lies in one line; null where there
// is no memory.
inline float* room_for(long numbers) {
    return static_cast<float*>(std::aligned_alloc(LINE, sizeof(float) * whole_lines(numbers)));
}

struct Step : Pages {
    const NewItem* query;             // [R, H, D]
    const int64_t *address, *of_row;  // [J], and [R, M]: each row's tiles among these, in the order of their tokens
    const int32_t *low, *high;        // [J]: the first token of a tile that is seen, and one past the last
    const uint8_t* is_tile;           // [R, M]
    const int64_t* first_tile;        // [R]: the number, in its request, of a row's first tile
    NewItem* output;                  // [R, H, D]
    float* sums;                      // [R, H]: logarithms of the sums of exponents of scores; null if not asked for
    long rows, most_tiles;
};

// The place of a head's keys, or values, in the tile at an address.
inline const Item* head_of_tile(const Pages& of, const void* plane, int64_t address, long kv_head) {
    return static_cast<const Item*>(plane) + (address * of.kv_heads + kv_head) * (of.dim + SCALES) * of.tile;
}

// The scales of the tokens of a head of int8, which lie behind its numbers.
inline const float* scales_of(const Pages& of, const Item* head) {
    return reinterpret_cast<const float*>(head + of.dim * of.tile);
}

// The numbers of a row that are multiplied at a time, and the vector of LANES keys or values that goes with them. Here
// these are single numbers.
template <Kind KIND>
struct Terms {
    typedef float Number;
    typedef Vec Vector;
    static constexpr long TOGETHER = 1;
    static inline Vector widen(const Item* p, long, uint32_t) { return Stored<KIND>::widen(p); }
    static inline Vector aside(const Number* p) { return load(p); }
    static inline void lay_aside(Number* p, Vector v) { store(p, v); }
    static inline Vec add(Vec sum, Number a, Vector v) { return sum + a * v; }  // a fused multiply-add
    static inline Vec narrow(Number* row, long i, Vec v) {
        store(row + i, v);
        return v;
    }
    static inline Vec weights(Vec scores, float scale, float top) { return exponential<false>(scores * scale - top); }
    static inline Vec narrowed(Vec v) { return v; }
};

#if defined(HAS_PAIRS)
// Pairs of neighbouring tokens' values, or of neighbouring channels of keys.
template <>
struct Terms<BFLOAT16> {
    typedef uint32_t Number;
    typedef Pairs Vector;
    static constexpr long TOGETHER = 2;
    // Loads the numbers at `p` and those at `p + apart`; what is not `seen` becomes zero, since 0 x NaN is NaN.
    static inline Vector widen(const uint16_t* p, long apart, uint32_t seen) {
        return as_pairs((words(p) | words(p + apart) << 16) & seen);
    }
    static inline Vector aside(const Number* p) { return as_pairs(*reinterpret_cast<const Bits*>(p)); }
    static inline void lay_aside(Number* p, Vector v) { *reinterpret_cast<Bits*>(p) = (Bits)v; }
    static inline Vec add(Vec sum, Number a, Vector v) { return add_pairs(sum, as_pairs(Bits{} + a), v); }
    static inline Vec narrowed(Vec v) { return (Vec)(words_of(rounded(v)) << 16); }
    // Stores numbers i .. i + LANES of a row, which may replace the row's float32 in place; returns them rounded.
    static inline Vec narrow(Number* row, long i, Vec v) {
        const Halves halves = rounded(v);
        *reinterpret_cast<Halves*>(reinterpret_cast<uint16_t*>(row) + i) = halves;
        return (Vec)(words_of(halves) << 16);
    }
    // A weight is rounded to bfloat16 afterwards, so that fewer bits of it need to be right.
    static inline Vec weights(Vec scores, float scale, float top) {
        return rough_power(scores * (scale * LOG2_E) - top * LOG2_E);
    }
};
#endif

typedef Terms<KIND>::Number Number;
constexpr long TOGETHER = Terms<KIND>::TOGETHER;
constexpr uint32_t FIRST = 0xffffu, SECOND = 0xffff0000u, BOTH = FIRST | SECOND;  // masks of a pair's numbers

// Keys, or values, as they lie in a page: the LANES numbers k are contiguous, and lie `apart` from the numbers k + 1.
// What lies at the same distance from `ahead`, two tiles further, is prefetched meanwhile: a single tile of 2 KiB is
// computed in less time than the memory takes to answer.
struct InPage {
    const Item *numbers, *ahead;
    long apart;
    uint32_t seen = BOTH;

    template <int V>
    inline void read(long k, Terms<KIND>::Vector* out) const {
        const long at = k * TOGETHER * apart;
        for (long i = 0; i < TOGETHER; i++)
            for (long lane = 0; lane < V * LANES; lane += LINE / sizeof(Item))
                __builtin_prefetch(ahead + at + i * apart + lane, 0, 2);
        for (int v = 0; v < V; v++) out[v] = Terms<KIND>::widen(numbers + at + v * LANES, apart, seen);
    }
};

// The same after it was laid aside: the numbers of a vector are contiguous, and vectors lie `apart`.
struct Aside {
    const Number* numbers;
    long apart;

    template <int V>
    inline void read(long k, Terms<KIND>::Vector* out) const {
        for (int v = 0; v < V; v++) out[v] = Terms<KIND>::aside(numbers + v * apart + k * LANES);
    }
};

// Lays the keys of a tile's head aside, as [tokens / LANES, D, LANES]; without a tile, writes zeros.
void lay_keys_aside(const Pages& of, const Item* keys, const Item* ahead, Number* to) {
    if (!keys) std::memset(to, 0, sizeof(*to) * of.tile * of.dim / TOGETHER);
    for (long token = 0; keys && token < of.tile; token += LANES) {
        const long first = token / of.key_lanes * of.dim * of.key_lanes + token % of.key_lanes;
        const InPage vectors = {keys + first, ahead + first, of.key_lanes};
        for (long k = 0; k < of.dim / TOGETHER; k++, to += LANES) {
            Terms<KIND>::Vector of_k[1];
            vectors.read<1>(k, of_k);
            Terms<KIND>::lay_aside(to, of_k[0]);
        }
    }
}

// Lays the values of a tile's head aside, as [D / LANES, tokens, LANES], where those of LANES channels lie `apart`.
// Where pairs are multiplied, tokens before `low` or from `high` on may hold anything, and zeros are written for them.
// Without a tile, all are zeros.
void lay_values_aside(const Pages& of, const Item* values, const Item* ahead, long low, long high, Number* to,
                      long apart) {
    for (long d = 0; d < of.dim; d += LANES, to += apart) {
        if (!values) {
            std::memset(to, 0, sizeof(*to) * of.tile / TOGETHER * LANES);
            continue;
        }
        const long first = d / of.value_lanes * of.tile * of.value_lanes + d % of.value_lanes;
        InPage vectors = {values + first, ahead + first, of.value_lanes};
        const auto is_seen = [&](long token) { return token >= low && token < high; };
        for (long k = 0; k < of.tile / TOGETHER; k++) {
            vectors.seen = (is_seen(k * TOGETHER) ? FIRST : 0) | (is_seen(k * TOGETHER + 1) ? SECOND : 0);
            Terms<KIND>::Vector of_k[1];
            vectors.read<1>(k, of_k);
            Terms<KIND>::lay_aside(to + k * LANES, of_k[0]);
        }
    }
}

// Adds numbers first .. last of N rows, which lie `stride` apart, times the V vectors of each number to the sums. The
// sums stay in registers only if each loop over them is unrolled.
template <int N, int V, typename Vectors>
inline __attribute__((always_inline)) void add(const Number* rows, long stride, const Vectors& vectors, long first,
                                               long last, Vec (&sums)[N][V]) {
    for (long k = first; k < last; k++) {
        typename Terms<KIND>::Vector of_k[V];
        vectors.template read<V>(k, of_k);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) sums[n][v] = Terms<KIND>::add(sums[n][v], rows[n * stride + k], of_k[v]);
    }
}

// Writes the scores [N, V * LANES] of N query heads with V vectors of keys, in rows that lie `stride` apart. Keys of
// int8 have `scales`.
template <int N, int V, typename Vectors>
void scored(const Pages& of, const Number* query, const Vectors& keys, const float* scales, float* scores, long stride) {
    Vec sums[N][V] = {};
    add(query, of.dim / TOGETHER, keys, 0, of.dim / TOGETHER, sums);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) {
            if constexpr (KIND == INT8) sums[n][v] *= load(scales + v * LANES);
            store(scores + n * stride + v * LANES, sums[n][v]);
        }
}

// Adds the weights of tokens low .. high of N rows times V vectors of their values to the sums. Where pairs are
// multiplied, the pair of the first or the last token may contain a token that is not seen, whose values may be
// anything.
template <int N, int V>
inline void add_seen(const Number* weights, long stride, InPage values, long low, long high, Vec (&sums)[N][V]) {
    const bool begins_odd = low % TOGETHER, ends_odd = high % TOGETHER;
    const long first = low / TOGETHER, last = high / TOGETHER;
    if (begins_odd) {
        values.seen = SECOND;
        add(weights, stride, values, first, first + 1, sums);
        values.seen = BOTH;
    }
    add(weights, stride, values, first + begins_odd, last, sums);
    if (ends_odd) {
        values.seen = FIRST;
        add(weights, stride, values, last, last + 1, sums);
    }
}

template <int N, int V>
inline void add_seen(const Number* weights, long stride, const Aside& values, long low, long high, Vec (&sums)[N][V]) {
    add(weights, stride, values, low / TOGETHER, (high + TOGETHER - 1) / TOGETHER, sums);
}

// Adds V vectors of the values of tokens low .. high to the sums [N, D], weighted by N query heads' weights, whose rows
// lie `stride` apart.
template <int N, int V, typename Vectors>
void weighed(const Pages& of, const Number* weights, long stride, const Vectors& values, long low, long high,
             float* sums) {
    Vec total[N][V];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) total[n][v] = load(sums + n * of.dim + v * LANES);
    add_seen(weights, stride, values, low, high, total);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums + n * of.dim + v * LANES, total[n][v]);
}

// The place of the weights, which replace the scores in the form in which they are multiplied by values.
inline Number* weights_of(float* scores) { return reinterpret_cast<Number*>(scores); }

// Writes a query in the form in which it is multiplied by keys.
inline void narrow_query(const NewItem* query, long dim, Number* narrow) {
    for (long d = 0; d < dim; d += LANES) Terms<KIND>::narrow(narrow, d, Stored<NEW_KIND>::widen(query + d));
}

// Replaces one head's products of a query with the keys of `count` tokens by their weights, in the form in which these
// are multiplied, or in float32 if IN_FLOATS. Returns the sum of the weights, and the largest score in `peak`.
template <bool IN_FLOATS = false>
float softened(float* scores, long count, const Pages& of, float* peak) {
    const float scale = of.cap > 0 ? 1.0f : of.scale;
    if (of.cap > 0)
        for (long i = 0; i < count; i++)
            if (scores[i] > LEAST) scores[i] = of.cap * std::tanh(scores[i] * of.scale / of.cap);
    constexpr int CHAINS = 4;  // maxima that do not wait for one another
    Vec most[CHAINS] = {};
    for (int c = 0; c < CHAINS; c++) most[c] += LEAST;
    long i = 0;
    for (; i + CHAINS * LANES <= count; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) most[c] = larger(load(scores + i + c * LANES), most[c]);
    for (; i < count; i += LANES) most[0] = larger(load(scores + i), most[0]);
    for (int c = 1; c < CHAINS; c++) most[0] = larger(most[c], most[0]);
    const float top = scale * largest_of(most[0]);
    Vec sums = {};
    for (i = 0; i < count; i += LANES) {
        const Vec weight = Terms<KIND>::weights(load(scores + i), scale, top);
        if constexpr (IN_FLOATS) {
            store(scores + i, Terms<KIND>::narrowed(weight));
            sums += load(scores + i);
        } else {
            sums += Terms<KIND>::narrow(weights_of(scores), i, weight);
        }
    }
    *peak = top;
    return total_of(sums);
}

// The place of a head's keys, or values, in tile number i of a row.
inline const Item* of_tile(const Step& of, const void* plane, long row, long i, long kv_head) {
    return head_of_tile(of, plane, of.address[of.of_row[row * of.most_tiles + i]], kv_head);
}

// Writes the scores of N rows with all keys of one tile's head.
template <int N, int V>
void scored_tile(const Pages& of, const Number* query, const Item* keys, const Item* ahead, float* scores,
                 long stride) {
    for (long from = 0; from < of.tile; from += V * LANES) {
        const long first = from / of.key_lanes * of.dim * of.key_lanes + from % of.key_lanes;
        const InPage vectors = {keys + first, ahead + first, of.key_lanes};
        scored<N, V>(of, query, vectors, scales_of(of, keys) + from, scores + from, stride);
    }
}

// Multiplies the weights of N rows by the scales of the values, in place of the values of int8 themselves.
inline void scale_weights(const Pages& of, const Item* values, int rows, float* weights, long stride) {
    for (int n = 0; n < rows; n++)
        for (long i = 0; i < of.tile; i += LANES) {
            float* own = weights + n * stride + i;
            store(own, load(own) * load(scales_of(of, values) + i));
        }
}

// Adds the values of tokens low .. high of one tile's head to the sums [N, D], weighted by N rows' weights.
template <int N, int V>
void weighed_tile(const Pages& of, const Number* weights, long stride, const Item* values, const Item* ahead, long low,
                  long high, float* sums) {
    for (long from = 0; from < of.dim; from += V * LANES) {
        const long first = from / of.value_lanes * of.tile * of.value_lanes + from % of.value_lanes;
        const InPage vectors = {values + first, ahead + first, of.value_lanes};
        weighed<N, V>(of, weights, stride, vectors, low, high, sums + from);
    }
}

#if !defined(HAS_AMX)
constexpr long AMX_ROWS = 16, AMX_TOKENS = 32;
struct Registers {
    explicit Registers(bool) {}
};
inline bool uses_amx(const Pages&) { return false; }
#else
// AMX computes heads that fill whole registers. It sums the products of 32 tokens together, which begin at a multiple
// of 32.
constexpr long AMX_TOKENS = 2 * AMX_WORDS;
inline bool uses_amx(const Pages& of) { return KIND == BFLOAT16 && of.dim % (2 * AMX_WORDS) == 0 && may_use_amx(); }

typedef AmxRegisters Registers;

// Multiplies 16 rows of x, which lie `x_stride` apart, by C matrices [steps * 16 pairs, 16], which lie `apart`, to
// y [16, C * 16], whose rows lie `y_stride` apart.
template <int C>
void multiply_in_amx(const Number* x, long x_stride, const Number* w, long apart, long steps, float* y, long y_stride) {
    const long from = sizeof(*x) * x_stride, to = sizeof(*y) * y_stride;
    constexpr long LINE_OF_W = 4 * AMX_WORDS, STEP = AMX_WORDS * AMX_WORDS;
    amx_memory();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (C > 2) _tile_zero(2);
    if constexpr (C > 2) _tile_zero(3);
    for (long step = 0; step < steps; step++, w += STEP) {
        _tile_loadd(4, x + step * AMX_WORDS, from);
        _tile_loadd(6, w, LINE_OF_W);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + apart, LINE_OF_W);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (C > 2) {
            _tile_loadd(6, w + 2 * apart, LINE_OF_W);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 3 * apart, LINE_OF_W);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, y, to);
    _tile_stored(1, y + AMX_WORDS, to);
    if constexpr (C > 2) _tile_stored(2, y + 2 * AMX_WORDS, to);
    if constexpr (C > 2) _tile_stored(3, y + 3 * AMX_WORDS, to);
}

// The same for any even number of matrices.
void multiply_all_in_amx(const Number* x, long x_stride, const Number* w, long apart, long count, long steps, float* y,
                         long y_stride) {
    long c = 0;
    for (; c + 4 <= count; c += 4)
        multiply_in_amx<4>(x, x_stride, w + c * apart, apart, steps, y + c * AMX_WORDS, y_stride);
    if (c < count) multiply_in_amx<2>(x, x_stride, w + c * apart, apart, steps, y + c * AMX_WORDS, y_stride);
}

// Adds to N vectors of sums in the order of AMX, so that a query alone has the same bits as in a prompt. For few rows
// this is as fast as AMX, and needs nothing to be laid aside.
template <int N>
struct Chains {
    Vec of_first[N] = {}, of_second[N] = {};  // the sums of the first and of the second numbers of pairs

    inline __attribute__((always_inline)) void add(bool is_second, const float* rows, long stride, const Item* p) {
        const Vec numbers = Stored<BFLOAT16>::widen(reinterpret_cast<const uint16_t*>(p));
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            if (is_second)
                of_second[n] += rows[n * stride] * numbers;  // a fused multiply-add
            else
                of_first[n] += rows[n * stride] * numbers;
        }
    }
    inline void end(Vec (&sums)[N]) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            sums[n] += of_first[n] + of_second[n];
            of_first[n] = of_second[n] = Vec{};
        }
    }
};

// Makes this thread take numbers smaller than 2^-126 for zeros for as long as it lives, as AMX does.
struct NoSmallNumbers {
    const unsigned before = _mm_getcsr();
    NoSmallNumbers() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
    ~NoSmallNumbers() { _mm_setcsr(before); }
};

// Writes the scores of N rows with all keys of one tile's head, in the order of AMX.
template <int N>
void score_as_amx(const Pages& of, const float* query, const Item* keys, const Item* ahead, float* scores, long stride) {
    for (long from = 0; from < of.tile; from += LANES) {
        const long first = from / of.key_lanes * of.dim * of.key_lanes + from % of.key_lanes;
        Chains<N> chains;
        Vec sums[N] = {};
        for (long d = 0; d < of.dim; d += AMX_TOKENS) {
            for (long k = d; k < d + AMX_TOKENS; k += 2) {
                const long at = first + k * of.key_lanes;
                __builtin_prefetch(ahead + at, 0, 2);
                __builtin_prefetch(ahead + at + of.key_lanes, 0, 2);
                chains.add(false, query + k, of.dim, keys + at);
                chains.add(true, query + k + 1, of.dim, keys + at + of.key_lanes);
            }
            chains.end(sums);
        }
        for (int n = 0; n < N; n++) store(scores + n * stride + from, sums[n]);
    }
}

// Adds the values of tokens low .. high of a tile to the chains, weighted by N rows' weights.
template <int N>
inline void weigh_as_amx(const Pages& of, const float* weights, long stride, const Item* values, const Item* ahead,
                         long low, long high, Chains<N>& chains) {
    const auto add = [&](bool is_second, long token) {
        __builtin_prefetch(ahead + token * of.value_lanes, 0, 2);
        chains.add(is_second, weights + token, stride, values + token * of.value_lanes);
    };
    if (low % 2 && low < high) add(true, low++);
    for (; low + 1 < high; low += 2) {
        add(false, low);
        add(true, low + 1);
    }
    if (low < high) add(false, low);
}

// Computes one part of a row as part_of does, in the order of AMX.
template <int N>
void part_as_amx(const Step& of, long row, long head, long first, long last, float* scores, float* sums, float* peaks,
                 float* totals) {
    const long kv_head = head / (of.heads / of.kv_heads), count = (last - first) * of.tile;
    float* query = scores + N * count;
    for (long d = 0; d < N * of.dim; d += LANES)
        store(query + d, Stored<NEW_KIND>::widen(of.query + (row * of.heads + head) * of.dim + d));
    const auto tile = [&](const void* plane, long i) { return of_tile(of, plane, row, std::min(i, last - 1), kv_head); };
    const auto seen = [&](const int32_t* bound, long i) { return bound[of.of_row[row * of.most_tiles + i]]; };
    for (long i = first; i < last; i++) {
        const Item* ahead = i + 2 < last ? tile(of.keys, i + 2) : tile(of.values, first + (i + 2 - last));
        {
            const NoSmallNumbers as_zeros;
            score_as_amx<N>(of, query, tile(of.keys, i), ahead, scores + (i - first) * of.tile, count);
        }
        for (int n = 0; n < N; n++) {
            float* own = scores + n * count + (i - first) * of.tile;
            std::fill(own, own + seen(of.low, i), LEAST);
            std::fill(own + seen(of.high, i), own + of.tile, LEAST);
        }
    }
    for (int n = 0; n < N; n++) totals[n] = softened<true>(scores + n * count, count, of, peaks + n);
    std::fill(sums, sums + N * of.dim, 0.0f);
    const NoSmallNumbers as_zeros;
    const long together = std::max(1L, AMX_TOKENS / of.tile);
    for (long i = first; i < last;) {
        const long end = std::min(last, i + together - (of.first_tile[row] + i) % together);
        for (long from = 0; from < of.tile; from += AMX_TOKENS)
            for (long d = 0; d < of.dim; d += LANES) {
                const long lying = d / of.value_lanes * of.tile * of.value_lanes + d % of.value_lanes;
                Chains<N> chains;
                Vec total[N];
                for (int n = 0; n < N; n++) total[n] = load(sums + n * of.dim + d);
                for (long j = i; j < end; j++) {
                    const long low = std::max<long>(seen(of.low, j), from);
                    const long high = std::min<long>(seen(of.high, j), from + AMX_TOKENS);
                    weigh_as_amx<N>(of, scores + (j - first) * of.tile, count, tile(of.values, j) + lying,
                                    tile(of.values, j + 2) + lying, low, high, chains);
                }
                chains.end(total);
                for (int n = 0; n < N; n++) store(sums + n * of.dim + d, total[n]);
            }
        i = end;
    }
}
#endif

// Computes one part of a row: N query heads from `head` on over some of the row's tiles. Writes the sums [N, D], the
// largest scores and the sums of weights.
template <int N>
void part_of(const Step& of, long row, long head, long first, long last, float* scores, float* sums, float* peaks,
             float* totals) {
    const long kv_head = head / (of.heads / of.kv_heads);
    const long count = (last - first) * of.tile;
    Number* query = weights_of(scores + N * count);  // It lies behind the scores
    narrow_query(of.query + (row * of.heads + head) * of.dim, N * of.dim, query);
    // Tile i in the order of reading: all keys, then all values. Numbers beyond the last tile name that one again.
    const auto in_order = [&](long i) {
        const long number = std::min(i < last ? i : first + (i - last), last - 1);
        return of_tile(of, i < last ? of.keys : of.values, row, number, kv_head);
    };
    for (long i = first; i < last; i++) {
        const long j = of.of_row[row * of.most_tiles + i], place = (i - first) * of.tile;
        const Item *keys = in_order(i), *ahead = in_order(i + 2);
        if (of.key_lanes % (2 * LANES) == 0)
            scored_tile<N, 2>(of, query, keys, ahead, scores + place, count);
        else
            scored_tile<N, 1>(of, query, keys, ahead, scores + place, count);
        for (int n = 0; n < N; n++) {
            float* own = scores + n * count + place;
            std::fill(own, own + of.low[j], LEAST);
            std::fill(own + of.high[j], own + of.tile, LEAST);
        }
    }
    for (int n = 0; n < N; n++) totals[n] = softened(scores + n * count, count, of, peaks + n);
    std::fill(sums, sums + N * of.dim, 0.0f);
    for (long i = first; i < last; i++) {
        const long j = of.of_row[row * of.most_tiles + i], place = (i - first) * of.tile;
        const Item* values = of_tile(of, of.values, row, i, kv_head);
        const Item* ahead = of_tile(of, of.values, row, std::min(i + 2, last - 1), kv_head);
        if constexpr (KIND == INT8) scale_weights(of, values, N, scores + place, count);
        const Number* weights = weights_of(scores) + place / TOGETHER;
        if (of.value_lanes % (2 * LANES) == 0)
            weighed_tile<N, 2>(of, weights, count, values, ahead, of.low[j], of.high[j], sums);
        else
            weighed_tile<N, 1>(of, weights, count, values, ahead, of.low[j], of.high[j], sums);
    }
}

// Computes one part of a row for `count` heads, at most MOST_HEADS.
template <int N = MOST_HEADS>
void part_of_heads(long count, const Step& of, long row, long head, long first, long last, float* scores, float* sums,
                   float* peaks, float* totals) {
    if (count == N) {
#if defined(HAS_AMX)
        if (uses_amx(of)) return part_as_amx<N>(of, row, head, first, last, scores, sums, peaks, totals);
#endif
        part_of<N>(of, row, head, first, last, scores, sums, peaks, totals);
    }
    if constexpr (N > 1)
        if (count < N) part_of_heads<N - 1>(count, of, row, head, first, last, scores, sums, peaks, totals);
}

// Computes one part of a row for all heads of a group. They read each tile together, or in as few equal shares as the
// registers allow.
void heads_of(const Step& of, long row, long kv_head, long first, long last, float* scores, float* sums, float* peaks,
              float* totals) {
    const long group = of.heads / of.kv_heads, shares = (group + MOST_HEADS - 1) / MOST_HEADS;
    for (long share = 0; share < shares; share++) {
        const long from = group * share / shares, count = group * (share + 1) / shares - from;
        part_of_heads(count, of, row, kv_head * group + from, first, last, scores, sums + from * of.dim, peaks + from,
                      totals + from);
    }
}

// What a row has read of one head so far: the largest score, the sum of the weights, and the weighted sum of values
// [D].
struct Read {
    float top, total;
    float* output;
};

inline Read begun(float sink, float* output, long dim) {
    std::fill(output, output + dim, 0.0f);
    return {sink, sink > LEAST ? 1.0f : 0.0f, output};
}

// Joins one more part, of which the row sees something.
inline void join(Read& read, float peak, float total, const float* sums, long dim) {
    // Computed without a branch, which the processor would guess wrong as often as not
    const bool is_higher = peak > read.top;
    const float gap = std::exp(is_higher ? read.top - peak : peak - read.top);
    const float before = is_higher ? gap : 1.0f, now = is_higher ? 1.0f : gap;
    read.top = is_higher ? peak : read.top;
    // The product that is fused with the sum is named here, because compilers could choose another one elsewhere
    read.total = __builtin_fmaf(read.total, before, total * now);
    for (long d = 0; d < dim; d++) read.output[d] = __builtin_fmaf(read.output[d], before, sums[d] * now);
}

inline void finish(const Read& read, long dim, NewItem* output) {
    const float share = 1.0f / read.total;
    for (long d = 0; d < dim; d += LANES) Stored<NEW_KIND>::narrow(output + d, load(read.output + d) * share);
}

// The number of tiles of a part, and the most parts of a row, whose first part may lack tiles.
inline long tiles_of_part(const Pages& of) { return std::max(1L, PART / of.tile); }
inline long most_parts(const Step& of) { return (of.most_tiles + 2 * tiles_of_part(of) - 2) / tiles_of_part(of); }

// The room that a thread needs for one part, in numbers: for scores and for queries.
inline long room_of_part(const Pages& of) { return MOST_HEADS * (tiles_of_part(of) * of.tile + of.dim); }

// The room that the parts of all heads of a row take until they are joined, in numbers.
inline long room_of_row(const Step& of) { return most_parts(of) * of.heads * (of.dim + 2); }

void attended(const Step& of, float* room, float* all_scores, int num_threads) {
    const long group = of.heads / of.kv_heads, tiles = tiles_of_part(of), parts = most_parts(of);
    const long units = of.rows * of.kv_heads, planes = units * parts * group;
    float *sums = room, *peaks = sums + planes * of.dim, *totals = peaks + planes;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        float* scores = all_scores + room_of_part(of) * thread_number();
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (long unit = 0; unit < units; unit++)
            for (long p = 0; p < parts; p++) {
                const long row = unit / of.kv_heads, at = (unit * parts + p) * group;
                const long missing = of.first_tile[row] % tiles, first = std::max(0L, p * tiles - missing);
                long last = std::min((p + 1) * tiles - missing, of.most_tiles);
                while (last > first && !of.is_tile[row * of.most_tiles + last - 1]) last--;
                if (last > first)
                    heads_of(of, row, unit % of.kv_heads, first, last, scores, sums + at * of.dim, peaks + at,
                             totals + at);
            }
#pragma omp for schedule(static)
        for (long unit = 0; unit < units; unit++) {
            const long row = unit / of.kv_heads, at = unit * parts * group;
            long count = of.most_tiles;
            while (!of.is_tile[row * of.most_tiles + count - 1]) count--;
            const long own_parts = (of.first_tile[row] % tiles + count + tiles - 1) / tiles;
            for (long g = 0; g < group; g++) {
                const long head = unit % of.kv_heads * group + g;
                Read read = begun(of.sinks[head], scores, of.dim);
                for (long p = 0; p < own_parts; p++) {
                    const long plane = at + p * group + g;
                    join(read, peaks[plane], totals[plane], sums + plane * of.dim, of.dim);
                }
                if (of.sums) of.sums[row * of.heads + head] = read.top + std::log(read.total);
                finish(read, of.dim, of.output + (row * of.heads + head) * of.dim);
            }
        }
    }
}

// Computes some rows at a time, so that their parts take bounded room whatever the number of rows. Returns false where
// there is no memory.
bool attended_in_turn(const Step& of, int num_threads) {
    const long at_once = std::max(1L, std::min(of.rows, ROOM / room_of_row(of)));
    float *room = room_for(at_once * room_of_row(of)), *scores = room_for(room_of_part(of) * num_threads);
    const bool has_memory = room && scores;
    for (long first = 0; has_memory && first < of.rows; first += at_once) {
        Step some = of;
        some.rows = std::min(at_once, of.rows - first);
        some.query += first * of.heads * of.dim;
        some.output += first * of.heads * of.dim;
        if (of.sums) some.sums += first * of.heads;
        some.of_row += first * of.most_tiles;
        some.is_tile += first * of.most_tiles;
        some.first_tile += first;
        attended(some, room, scores, num_threads);
    }
    std::free(room);
    std::free(scores);
    return has_memory;
}

struct Prompts : Pages {
    const NewItem* query;    // [T, H, D]
    const int64_t* address;  // of the tiles of all spans
    const int64_t* spans;    // [S, 4]: first row of the query, first position, one past the last, and the place among the
                             // addresses at which tile 0 of the request would stand
    NewItem* output;         // [T, H, D]
    long num_spans, window, first_key;  // a window of 0 is none
};

// The memory in which one thread computes a block of rows.
struct Room {
    float *scores, *sums, *output, *tops, *totals, *scales;
    Number *query, *aside;
    long rows;

    static long queries_of(const Pages& of) {
        return std::max(1L, (uses_amx(of) ? AMX_BLOCK : BLOCK) / (of.heads / of.kv_heads));
    }
    static long rows_of(const Pages& of, long num_queries) {
        return whole(num_queries * (of.heads / of.kv_heads), uses_amx(of) ? AMX_ROWS : MOST_HEADS);
    }
    static long rows_of(const Pages& of) { return rows_of(of, queries_of(of)); }
    // The rows for which scores and sums are kept, and the tokens that are laid aside. AMX computes a part by a few
    // rows at a time, whose scores stay in the first cache.
    static long rows_at_once(const Pages& of) { return uses_amx(of) ? AMX_ROWS : rows_of(of); }
    static long tokens_aside(const Pages& of) { return uses_amx(of) ? tiles_of_part(of) * of.tile : STRETCH; }
    // Rows of scores lie apart by no power of 2, so that they do not fall into the same lines of the first cache.
    static long stride(const Pages& of) { return tiles_of_part(of) * of.tile + LINE / sizeof(float); }
    static long numbers(const Pages& of) {
        return rows_of(of) * 2 * of.dim + rows_at_once(of) * (of.dim + stride(of)) + STRETCH +
               tokens_aside(of) * of.dim + whole_lines(2 * rows_of(of));
    }
    // Divides the memory for a block of so many queries, which may be fewer than there is room for.
    Room(const Pages& of, float* at, long num_queries) : rows(rows_of(of, num_queries)) {
        query = weights_of(at);
        output = at + rows_of(of) * of.dim;
        sums = output + rows_of(of) * of.dim;
        scores = sums + rows_at_once(of) * of.dim;
        scales = scores + rows_at_once(of) * stride(of);
        aside = weights_of(scales + STRETCH);
        tops = scales + STRETCH + tokens_aside(of) * of.dim;
        totals = tops + rows_of(of);
    }
};

// Neighbouring queries of one span for one head of keys and values. Row r is query r / group; rows behind the last are
// its copies, so that whole vectors of rows are computed.
struct Block {
    const Prompts& of;
    const int64_t* address;  // address[i] is that of tile i of the request
    long kv_head, first, last, group;  // positions of the first query, and of the last

    long position(long row) const { return std::min(first + row / group, last); }
    long high(long row) const { return position(row) + 1; }
    long low(long row) const {
        const long at = position(row), seen = std::min(of.first_key, at);
        return of.window ? std::max(seen, at + 1 - of.window) : seen;
    }
    // Whether a row sees some of tokens begin .. end.
    bool sees(long row, long begin, long end) const { return low(row) < end && high(row) > begin; }
};

// Tokens from .. to that a block reads: a stretch of a part, and the part begins at token `begin`.
struct Stretch {
    const Block& block;
    long begin, from, to;

    // Null where no query of the block sees the tile.
    const Item* tile(const void* plane, long token) const {
        const long tokens = block.of.tile;
        if (token + tokens <= block.low(0) || token > block.last) return nullptr;
        return head_of_tile(block.of, plane, block.address[token / block.of.tile], block.kv_head);
    }
};

// Lays the keys of a stretch aside, and in int8 their scales.
void lay_keys_aside(const Stretch& of, Number* aside, float* scales) {
    const Pages& pages = of.block.of;
    for (long token = of.from; token < of.to; token += pages.tile) {
        const Item *keys = of.tile(pages.keys, token), *next = of.tile(pages.keys, token + pages.tile);
        lay_keys_aside(pages, keys, next ? next : keys, aside + (token - of.from) * pages.dim / TOGETHER);
        if constexpr (KIND == INT8)
            std::memcpy(scales + (token - of.from), scales_of(pages, keys), sizeof(float) * pages.tile);
    }
}

// Lays the values of a stretch aside. In pairs, a token that the block does not see may hold anything.
void lay_values_aside(const Stretch& of, Number* aside) {
    const Pages& pages = of.block.of;
    for (long token = of.from; token < of.to; token += pages.tile) {
        const Item *values = of.tile(pages.values, token), *next = of.tile(pages.values, token + pages.tile);
        Number* to = aside + (token - of.from) * LANES / TOGETHER;
        lay_values_aside(pages, values, next ? next : values, of.block.low(0) - token, of.block.last + 1 - token, to,
                            (of.to - of.from) * LANES / TOGETHER);
    }
}

// Writes the scores of all rows of a block with a stretch, -infinity for tokens that a row does not see. The scores of
// MOST_HEADS neighbouring rows end with the vector of the last token that one of them sees.
void scores_of(const Stretch& of, const Room& room, long stride) {
    constexpr int N = MOST_HEADS;
    const Block& block = of.block;
    const Pages& pages = block.of;
    lay_keys_aside(of, room.aside, room.scales);
    for (long row = 0; row < room.rows; row += N) {
        const long count = whole(std::min(block.high(row + N - 1), of.to) - of.from, LANES);
        float* scores = room.scores + row * stride + (of.from - of.begin);
        for (long token = 0; token < count; token += 2 * LANES) {
            const Aside keys = {room.aside + token * pages.dim / TOGETHER, pages.dim / TOGETHER * LANES};
            const Number* query = room.query + row * pages.dim / TOGETHER;
            if (token + LANES < count)
                scored<N, 2>(pages, query, keys, room.scales + token, scores + token, stride);
            else
                scored<N, 1>(pages, query, keys, room.scales + token, scores + token, stride);
        }
        for (int n = 0; n < N && count > 0; n++) {
            float* own = scores + n * stride;
            const long low = block.low(row + n) - of.from, high = block.high(row + n) - of.from;
            if (low > 0) std::fill(own, own + std::min(low, count), LEAST);
            if (high < count) std::fill(own + std::max(high, 0L), own + count, LEAST);
        }
    }
}

// Adds the values of a stretch to the sums of all rows, by their weights.
void weigh(const Stretch& of, const Room& room, long stride) {
    constexpr int N = MOST_HEADS;
    const Block& block = of.block;
    const Pages& pages = block.of;
    const long count = of.to - of.from;
    lay_values_aside(of, room.aside);
    for (long row = 0; row < room.rows; row += N) {
        const long low = std::max(block.low(row) - of.from, 0L);
        const long high = std::min(block.high(row + N - 1) - of.from, count);
        if (low >= high) continue;
        float* own = room.scores + row * stride + (of.from - of.begin);
        if constexpr (KIND == INT8)
            for (long token = 0; token < high; token += pages.tile)
                scale_weights(pages, of.tile(pages.values, of.from + token), N, own + token, stride);
        const Number* weights = weights_of(room.scores) + row * stride + (of.from - of.begin) / TOGETHER;
        for (long d = 0; d < pages.dim; d += 2 * LANES) {
            const Aside values = {room.aside + d * count / TOGETHER, count / TOGETHER * LANES};
            float* sums = room.sums + row * pages.dim + d;
            if (d + LANES < pages.dim)
                weighed<N, 2>(pages, weights, stride, values, low, high, sums);
            else
                weighed<N, 1>(pages, weights, stride, values, low, high, sums);
        }
    }
}

#if defined(HAS_AMX)
// Reads one part, tokens begin .. end, as read_part does, by AMX and 16 rows at a time.
void read_part_in_amx(const Block& block, const Room& room, Read* reads, long begin, long end) {
    const Prompts& of = block.of;
    const Stretch part = {block, begin, begin, end};
    const long stride = Room::stride(of), of_query = of.dim / TOGETHER;
    Number *keys = room.aside, *values = keys + (end - begin) * of_query;
    lay_keys_aside(part, keys, room.scales);
    lay_values_aside(part, values);
    for (long row = 0; row < room.rows; row += AMX_ROWS) {
        const long seen = std::min(block.high(row + AMX_ROWS - 1), end) - begin, count = whole(seen, AMX_TOKENS);
        if (seen <= 0 || block.low(row) >= end) continue;
        multiply_all_in_amx(room.query + row * of_query, of_query, keys, of_query * AMX_WORDS, count / AMX_WORDS,
                            of_query / AMX_WORDS, room.scores, stride);
        for (long n = 0; n < AMX_ROWS; n++) {
            float* own = room.scores + n * stride;
            const long low = std::min(block.low(row + n) - begin, count), high = block.high(row + n) - begin;
            if (low > 0) std::fill(own, own + low, LEAST);
            if (high < count) std::fill(own + std::max(high, 0L), own + count, LEAST);
            if (block.sees(row + n, begin, end))
                room.totals[row + n] = softened(own, count, of, room.tops + row + n);
            else
                std::fill(own, own + count, 0.0f);
        }
        multiply_all_in_amx(weights_of(room.scores), stride, values, (end - begin) / TOGETHER * AMX_WORDS,
                            of.dim / AMX_WORDS, count / AMX_TOKENS, room.sums, of.dim);
        for (long n = row; n < row + AMX_ROWS; n++)
            if (block.sees(n, begin, end))
                join(reads[n], room.tops[n], room.totals[n], room.sums + (n - row) * of.dim, of.dim);
    }
}
#endif

// Reads one part, tokens begin .. end: computes the weights of the rows that see some of it and the sums of their
// values, and joins these with the parts before.
void read_part(const Block& block, const Room& room, Read* reads, long begin, long end) {
    const Prompts& of = block.of;
    const long stride = Room::stride(of);
    for (long from = begin; from < end; from += STRETCH)
        scores_of({block, begin, from, std::min(from + STRETCH, end)}, room, stride);
    for (long row = 0; row < room.rows; row++) {
        const long last = std::min(block.high(row / MOST_HEADS * MOST_HEADS + MOST_HEADS - 1), end);
        const long count = whole(last - begin, LANES);
        float* own = room.scores + row * stride;
        if (count <= 0) continue;
        if (block.sees(row, begin, end))
            room.totals[row] = softened(own, count, of, room.tops + row);
        else
            std::fill(own, own + count, 0.0f);
    }
    std::fill(room.sums, room.sums + room.rows * of.dim, 0.0f);
    for (long from = begin; from < end; from += STRETCH)
        weigh({block, begin, from, std::min(from + STRETCH, end)}, room, stride);
    for (long row = 0; row < room.rows; row++)
        if (block.sees(row, begin, end))
            join(reads[row], room.tops[row], room.totals[row], room.sums + row * of.dim, of.dim);
}

void read_block(const Block& block, const Room& room, Read* reads, long first_row) {
    const Prompts& of = block.of;
    [[maybe_unused]] const Registers registers(uses_amx(of));
    for (long row = 0; row < room.rows; row++) {
        const long head = block.kv_head * block.group + row % block.group;
        const long at = ((first_row + block.position(row) - block.first) * of.heads + head) * of.dim;
        narrow_query(of.query + at, of.dim, room.query + row * of.dim / TOGETHER);
        reads[row] = begun(of.sinks[head], room.output + row * of.dim, of.dim);
    }
    // AMX multiplies weights of 32 tokens together, which may be those of two tiles
    const long together = uses_amx(of) ? std::max(1L, AMX_TOKENS / of.tile) : 1;
    const long tiles = tiles_of_part(of), end = whole(block.last / of.tile + 1, together);
    for (long begin = block.low(0) / of.tile / together * together; begin < end;) {
        const long stop = std::min((begin / tiles + 1) * tiles, end);
#if defined(HAS_AMX)
        if (uses_amx(of))
            read_part_in_amx(block, room, reads, begin * of.tile, stop * of.tile);
        else
#endif
            read_part(block, room, reads, begin * of.tile, stop * of.tile);
        begin = stop;
    }
    for (long row = 0; row < (block.last - block.first + 1) * block.group; row++) {
        const long head = block.kv_head * block.group + row % block.group;
        const long at = ((first_row + row / block.group) * of.heads + head) * of.dim;
        finish(reads[row], of.dim, of.output + at);
    }
}

// Returns false where there is no memory. All spans are shared out at once, and the longest blocks of a span come first,
// so that no thread waits for one at the end.
bool prompts_read(const Prompts& of, int num_threads) {
    const long numbers = Room::numbers(of), group = of.heads / of.kv_heads, queries = Room::queries_of(of);
    const long rows = Room::rows_of(of);
    float* rooms = room_for(numbers * num_threads);
    Read* reads = static_cast<Read*>(std::malloc(sizeof(Read) * rows * num_threads));
    const bool has_memory = rooms && reads;
    const auto blocks_of = [&](long s) { return (of.spans[4 * s + 2] - of.spans[4 * s + 1] + queries - 1) / queries; };
    long blocks = 0;
    for (long s = 0; s < of.num_spans; s++) blocks += blocks_of(s);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic, 1)
    for (long unit = 0; unit < (has_memory ? blocks * of.kv_heads : 0); unit++) {
        long s = 0, number = unit / of.kv_heads;
        while (number >= blocks_of(s)) number -= blocks_of(s++);
        const int64_t* span = of.spans + 4 * s;
        const long first = (blocks_of(s) - 1 - number) * queries;
        const long last = std::min(first + queries, long(span[2] - span[1])) - 1;
        const Block block = {of, of.address + span[3], unit % of.kv_heads, span[1] + first, span[1] + last, group};
        read_block(block, Room(of, rooms + numbers * thread_number(), last + 1 - first), reads + rows * thread_number(),
                   span[0] + first);
    }
    std::free(rooms);
    std::free(reads);
    return has_memory;
}

// The scale of a head's numbers in int8: the one by which the largest number becomes 127, or 1 where the numbers are
// multiples of their channels' own scales already (`in_units`). It is not finite where the head is not.
inline float scale_of(const float* x, long dim, bool in_units) {
    float most = 0;
    bool has_nan = false;
    for (long d = 0; d < dim; d++) {
        const float size = std::fabs(x[d]);
        has_nan |= size != size;
        most = size > most ? size : most;
    }
    if (has_nan || (in_units && most > FLT_MAX)) return std::numeric_limits<float>::quiet_NaN();
    return in_units ? 1.0f : std::max(most / 127, FLT_MIN);  // zeros are not divided by zero
}

// Converts a number to the form in which pages hold it.
template <typename New>
inline Item stored(New x, float scale) {
    if constexpr (KIND == INT8) {
        const float number = x / scale;
        return std::isnan(number) ? 0 : static_cast<Item>(std::rint(std::min(std::max(number, -128.0f), 127.0f)));
    } else {
        return x;
    }
}

// Writes a new token's numbers of one head to their places in its tile: runs of `run` numbers lie `next_run` apart, and
// the numbers of a run lie `apart`.
template <typename New>
void written(const New* x, Item* head, const Pages& of, long first, long run, long next_run, long apart, long token,
             bool in_units) {
    float scale = 1;
    if constexpr (KIND == INT8) {
        scale = scale_of(x, of.dim, in_units);
        reinterpret_cast<float*>(head + of.dim * of.tile)[token] = scale;
    }
    for (long d = 0; d < of.dim; d += run)
        for (long i = 0; i < run; i++) head[first + d / run * next_run + i * apart] = stored(x[d + i], scale);
}

}  // namespace

extern "C" {

// Computes single queries, and the logarithms of their sums of exponents where `sums` is given. Returns whether there
// was memory for it.
bool decode(const Pages* pages, const void* query, const int64_t* address, const int64_t* of_row, const int32_t* low,
            const int32_t* high, const uint8_t* is_tile, const int64_t* first_tile, void* output, float* sums,
            long rows, long most_tiles, int num_threads) {
    Step of;
    static_cast<Pages&>(of) = *pages;
    of.query = static_cast<const NewItem*>(query), of.output = static_cast<NewItem*>(output);
    of.address = address, of.of_row = of_row, of.low = low, of.high = high, of.is_tile = is_tile;
    of.first_tile = first_tile, of.sums = sums, of.rows = rows, of.most_tiles = most_tiles;
    return attended_in_turn(of, num_threads);
}

// Computes spans of prompts, whose own keys and values are in the pages already. Returns whether there was memory for
// it.
bool extend(const Pages* pages, const void* query, const int64_t* address, const int64_t* spans, void* output,
            long num_spans, long window, long first_key, int num_threads) {
    Prompts of;
    static_cast<Pages&>(of) = *pages;
    of.query = static_cast<const NewItem*>(query), of.output = static_cast<NewItem*>(output);
    of.address = address, of.spans = spans;
    of.num_spans = num_spans, of.window = window, of.first_key = first_key;
    return prompts_read(of, num_threads);
}

// Writes key and value [T, K, D], which have the pages' type, or float32 where that is int8. Tokens lie as far apart as
// the strides say; places [T] are those of the tokens in the cache, counted over all pages.
void write_tokens(const Pages* pages, const void* key, const void* value, const int64_t* places, long num_tokens,
                  long key_stride, long value_stride, bool in_units, int num_threads) {
    const Pages& of = *pages;
    const auto *keys = static_cast<const NewItem*>(key), *values = static_cast<const NewItem*>(value);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens > FEW_TOKENS)
    for (long t = 0; t < num_tokens; t++) {
        const long address = places[t] / of.tile, token = places[t] % of.tile;
        for (long k = 0; k < of.kv_heads; k++) {
            const long of_key = token / of.key_lanes * of.dim * of.key_lanes + token % of.key_lanes;
            written(keys + t * key_stride + k * of.dim, const_cast<Item*>(head_of_tile(of, of.keys, address, k)), of,
                    of_key, of.dim, 0, of.key_lanes, token, in_units);
            written(values + t * value_stride + k * of.dim, const_cast<Item*>(head_of_tile(of, of.values, address, k)),
                    of, token * of.value_lanes, of.value_lanes, of.tile * of.value_lanes, 1, token, in_units);
        }
    }
}
}
