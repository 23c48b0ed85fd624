// Attention of single queries over a paged cache whose pages lie as attention/cpu/attention.py arranges them.
//
// A tile is W tokens of a page: keys [K, W / S, D, S] and values [K, D / E, W, E], stored in float32, bfloat16 or
// float16 and widened to float32 in registers, exactly. Each row reads its tiles in the order of their tokens, in
// parts of so many tiles, and the parts' softmaxes are joined in their order. What a row computes for a head of keys
// and values thus depends on its own tiles alone: its bits are the same in any batch and on any number of threads.
//
// The query heads that share a head of keys and values are computed together, so that what is read is widened once
// for all of them. Compiled with the flags of the machine that it runs on; vectors are the compiler's own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_HEADS = 8;  // 16 sums and 2 vectors in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST_HEADS = 4;  // 8 sums and 2 vectors in 16 registers
#else
constexpr int LANES = 4, MOST_HEADS = 8;
#endif
constexpr long PART = 512;  // tokens of a part at most: their scores stay in the first cache
constexpr long ROOM = 1 << 23;  // numbers that rows' parts take at a time: 32 MiB
constexpr long LINE = 64;   // bytes that a prefetch brings
constexpr float LEAST = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

template <Kind KIND>
struct Stored {
    typedef uint16_t Item;
    static inline Vec widen(const Item* p) {
        if constexpr (KIND == BFLOAT16) {
            return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits) << 16);
        } else {
#if defined(__AVX512F__)
            return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
            return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
            return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#endif
        }
    }
};

template <>
struct Stored<FLOAT32> {
    typedef float Item;
    static inline Vec widen(const Item* p) { return *reinterpret_cast<const Vec*>(p); }
};

inline long thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// e^x of numbers up to 0, to the last bit but one; numbers under -87 and -infinity give 0 (Cephes, expf).
inline Vec exponential(Vec x) {
    const Ints small = x < -87.0f;
    x = small ? Vec{} : x;
    const Vec count = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // the nearest whole number
    Vec rest = x - count * 0.693359375f;
    rest = rest + count * 2.12194440e-4f;
    Vec sum = Vec{} + 1.9875691500e-4f;
    for (const float each : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + each;
    const Vec fraction = sum * (rest * rest) + rest + 1.0f;
    const Ints power = (__builtin_convertvector(count, Ints) + 127) << 23;
    return small ? Vec{} : fraction * (Vec)power;
}

struct Step {
    const float* query;  // [R, H, D]
    const void *keys, *values;
    const float* sinks;            // [H], -infinity without
    const int64_t *address, *of_row;  // [J], and [R, M]: each row's tiles among these, in the order of their tokens
    const int32_t *low, *high;     // [J]: the first token of a tile that is seen, and one past the last
    const uint8_t* is_tile;        // [R, M]
    float* output;                 // [R, H, D]
    long rows, most_tiles, heads, kv_heads, dim, tile, key_lanes, value_lanes;
    float scale, cap;  // a cap of 0 is none
};

// What lies as far behind `ahead` as what is read lies behind its own beginning is brought into the cache meanwhile.
template <typename Item>
inline void fetch(const Item* ahead, long at, int count) {
    for (long i = 0; i < count; i += LINE / sizeof(Item)) __builtin_prefetch(ahead + at + i, 0, 2);
}

// Scores of N query heads with V vectors of the keys of one tile's head, from token `from` on. [N, W], rows `stride`
// apart
template <Kind KIND, int N, int V>
void scored(const Step& of, const float* query, const typename Stored<KIND>::Item* keys,
            const typename Stored<KIND>::Item* ahead, long from, float* scores, long stride) {
    const long first = from / of.key_lanes * of.dim * of.key_lanes + from % of.key_lanes;
    Vec sums[N][V] = {};
    for (long d = 0; d < of.dim; d++) {
        const long at = first + d * of.key_lanes;
        fetch(ahead, at, V * LANES);
        Vec key[V];
        for (int v = 0; v < V; v++) key[v] = Stored<KIND>::widen(keys + at + v * LANES);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) sums[n][v] += query[n * of.dim + d] * key[v];  // fused multiply-adds
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(scores + n * stride + from + v * LANES, sums[n][v] * of.scale);
}

// V vectors of the values of one tile's head, from channel `from` on, weighed by N query heads' weights [N, W], are
// added to the sums [N, D].
template <Kind KIND, int N, int V>
void weighed(const Step& of, const float* weights, long stride, const typename Stored<KIND>::Item* values,
             const typename Stored<KIND>::Item* ahead, long from, long low, long high, float* sums) {
    const long first = from / of.value_lanes * of.tile * of.value_lanes + from % of.value_lanes;
    Vec total[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) total[n][v] = load(sums + n * of.dim + from + v * LANES);
    for (long token = low; token < high; token++) {
        const long at = first + token * of.value_lanes;
        fetch(ahead, at, V * LANES);
        Vec value[V];
        for (int v = 0; v < V; v++) value[v] = Stored<KIND>::widen(values + at + v * LANES);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) total[n][v] += weights[n * stride + token] * value[v];
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums + n * of.dim + from + v * LANES, total[n][v]);
}

// The weights of one head's scores of `count` tokens, in place; returns their sum, and the largest score in `peak`.
float softened(float* scores, long count, float cap, float* peak) {
    if (cap > 0)
        for (long i = 0; i < count; i++)
            if (scores[i] > LEAST) scores[i] = cap * std::tanh(scores[i] / cap);
    Vec most = Vec{} + LEAST;
    for (long i = 0; i < count; i += LANES) most = load(scores + i) > most ? load(scores + i) : most;
    float top = LEAST;
    for (int lane = 0; lane < LANES; lane++) top = std::max(top, most[lane]);
    Vec sums = {};
    for (long i = 0; i < count; i += LANES) {
        const Vec weight = exponential(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    *peak = top;
    return sum;
}

// Where a head's keys, or values, lie in the tile that is number i of a row.
template <typename Item>
const Item* of_tile(const Step& of, const void* plane, long row, long i, long kv_head) {
    const long address = of.address[of.of_row[row * of.most_tiles + i]];
    return static_cast<const Item*>(plane) + (address * of.kv_heads + kv_head) * of.dim * of.tile;
}

// One part of a row: N query heads from `head` on over some of the row's tiles. Returns sums [N, D], the largest
// scores and the sums of weights.
template <Kind KIND, int N>
void part_of(const Step& of, long row, long head, long first, long last, float* scores, float* sums, float* peaks,
             float* totals) {
    typedef typename Stored<KIND>::Item Item;
    const long kv_head = head / (of.heads / of.kv_heads);
    const long count = (last - first) * of.tile;
    const float* query = of.query + (row * of.heads + head) * of.dim;
    for (long i = first; i < last; i++) {
        const long j = of.of_row[row * of.most_tiles + i], place = (i - first) * of.tile;
        const Item* keys = of_tile<Item>(of, of.keys, row, i, kv_head);
        const Item* ahead = i + 1 < last ? of_tile<Item>(of, of.keys, row, i + 1, kv_head) : of_tile<Item>(of, of.values, row, first, kv_head);
        if (of.key_lanes % (2 * LANES) == 0)
            for (long from = 0; from < of.tile; from += 2 * LANES)
                scored<KIND, N, 2>(of, query, keys, ahead, from, scores + place, count);
        else
            for (long from = 0; from < of.tile; from += LANES)
                scored<KIND, N, 1>(of, query, keys, ahead, from, scores + place, count);
        for (int n = 0; n < N; n++) {
            float* own = scores + n * count + place;
            std::fill(own, own + of.low[j], LEAST);
            std::fill(own + of.high[j], own + of.tile, LEAST);
        }
    }
    for (int n = 0; n < N; n++) totals[n] = softened(scores + n * count, count, of.cap, peaks + n);
    std::fill(sums, sums + N * of.dim, 0.0f);
    for (long i = first; i < last; i++) {
        const long j = of.of_row[row * of.most_tiles + i], place = (i - first) * of.tile;
        const Item* values = of_tile<Item>(of, of.values, row, i, kv_head);
        const Item* ahead = of_tile<Item>(of, of.values, row, std::min(i + 1, last - 1), kv_head);
        const long low = of.low[j], high = of.high[j];
        if (of.value_lanes % (2 * LANES) == 0)
            for (long from = 0; from < of.dim; from += 2 * LANES)
                weighed<KIND, N, 2>(of, scores + place, count, values, ahead, from, low, high, sums);
        else
            for (long from = 0; from < of.dim; from += LANES)
                weighed<KIND, N, 1>(of, scores + place, count, values, ahead, from, low, high, sums);
    }
}

template <Kind KIND>
void heads_of(const Step& of, long row, long kv_head, long first, long last, float* scores, float* sums, float* peaks,
              float* totals) {
    const long group = of.heads / of.kv_heads;
    long head = kv_head * group;
    const long end = head + group;
    while (head < end) {
        const long left = std::min<long>(end - head, MOST_HEADS), taken = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        auto* part = part_of<KIND, 1>;
        if (taken == 8) part = part_of<KIND, 8>;
        if (taken == 4) part = part_of<KIND, 4>;
        if (taken == 2) part = part_of<KIND, 2>;
        part(of, row, head, first, last, scores, sums, peaks, totals);
        head += taken;
        sums += taken * of.dim;
        peaks += taken;
        totals += taken;
    }
}

// Join the parts of a row's query head in their order.
void joined(const Step& of, long head, long parts, long stride, const float* sums, const float* peaks,
            const float* totals, float* output) {
    float top = of.sinks[head];
    for (long p = 0; p < parts; p++) top = std::max(top, peaks[p * stride]);
    float total = std::exp(of.sinks[head] - top);
    std::fill(output, output + of.dim, 0.0f);
    for (long p = 0; p < parts; p++) {
        const float share = std::exp(peaks[p * stride] - top);
        total += share * totals[p * stride];
        const float* own = sums + p * stride * of.dim;
        for (long d = 0; d < of.dim; d++) output[d] += share * own[d];
    }
    for (long d = 0; d < of.dim; d++) output[d] /= total;
}

// A part has so many tiles, and the longest row so many parts.
inline long tiles_of_part(const Step& of) { return std::max(1L, PART / of.tile); }
inline long most_parts(const Step& of) { return (of.most_tiles + tiles_of_part(of) - 1) / tiles_of_part(of); }

// Numbers that the parts of a row's heads take until they are joined.
inline long room_of_row(const Step& of) { return most_parts(of) * of.heads * (of.dim + 2); }

template <Kind KIND>
void attended(const Step& of, float* room, float* all_scores, int num_threads) {
    const long group = of.heads / of.kv_heads, tiles = tiles_of_part(of), parts = most_parts(of);
    const long units = of.rows * of.kv_heads, planes = units * parts * group;
    float *sums = room, *peaks = sums + planes * of.dim, *totals = peaks + planes;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        float* scores = all_scores + MOST_HEADS * tiles * of.tile * thread_number();
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (long unit = 0; unit < units; unit++)
            for (long p = 0; p < parts; p++) {
                const long row = unit / of.kv_heads, first = p * tiles, at = (unit * parts + p) * group;
                long last = std::min(first + tiles, of.most_tiles);
                while (last > first && !of.is_tile[row * of.most_tiles + last - 1]) last--;
                if (last > first)
                    heads_of<KIND>(of, row, unit % of.kv_heads, first, last, scores, sums + at * of.dim, peaks + at,
                                   totals + at);
            }
    }
    for (long unit = 0; unit < units; unit++) {
        const long row = unit / of.kv_heads, at = unit * parts * group;
        long count = of.most_tiles;
        while (!of.is_tile[row * of.most_tiles + count - 1]) count--;
        for (long g = 0; g < group; g++) {
            const long head = unit % of.kv_heads * group + g;
            joined(of, head, (count + tiles - 1) / tiles, group, sums + (at + g) * of.dim, peaks + at + g,
                   totals + at + g, of.output + (row * of.heads + head) * of.dim);
        }
    }
}

// Some rows at a time, so that what their parts take is bounded whatever the number of rows; returns false where there
// is no memory.
template <Kind KIND>
bool attended_in_turn(const Step& of, int num_threads) {
    const long at_once = std::max(1L, std::min(of.rows, ROOM / room_of_row(of)));
    float* room = static_cast<float*>(std::malloc(sizeof(float) * at_once * room_of_row(of)));
    float* scores =
        static_cast<float*>(std::malloc(sizeof(float) * MOST_HEADS * tiles_of_part(of) * of.tile * num_threads));
    const bool has_memory = room && scores;
    for (long first = 0; has_memory && first < of.rows; first += at_once) {
        Step some = of;
        some.rows = std::min(at_once, of.rows - first);
        some.query += first * of.heads * of.dim;
        some.output += first * of.heads * of.dim;
        some.of_row += first * of.most_tiles;
        some.is_tile += first * of.most_tiles;
        attended<KIND>(some, room, scores, num_threads);
    }
    std::free(room);
    std::free(scores);
    return has_memory;
}

}  // namespace

extern "C" {

// Returns whether there was memory for it.
bool decode(const float* query, const void* keys, const void* values, const float* sinks, const int64_t* address,
            const int64_t* of_row, const int32_t* low, const int32_t* high, const uint8_t* is_tile, float* output,
            long rows, long most_tiles, long heads, long kv_heads, long dim, long tile, long key_lanes,
            long value_lanes, float scale, float cap, int kind, int num_threads) {
    const Step of = {query, keys,       values, sinks,    address, of_row, low,       high,        is_tile, output,
                     rows,  most_tiles, heads,  kv_heads, dim,     tile,   key_lanes, value_lanes, scale,   cap};
    if (kind == FLOAT32) return attended_in_turn<FLOAT32>(of, num_threads);
    if (kind == BFLOAT16) return attended_in_turn<BFLOAT16>(of, num_threads);
    return attended_in_turn<FLOAT16>(of, num_threads);
}
}
