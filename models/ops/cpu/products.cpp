// Products of rows with weights that stay in bfloat16, float16 or float32, summed in float32.
//
// A weight [N, K] is packed once in panels of NR outputs, [N / NR, K, NR], in the type in which it is stored; the
// outputs that are missing in the last panel are zeros. Stored numbers are widened to float32 exactly, in
// registers, so the product of float32 rows is the float32 product of the same numbers, at half of the bytes.
//
// Where the processor multiplies pairs of bfloat16 and adds both products to a float32 itself (AVX512-BF16, Arm's
// BF16), rows and weights of bfloat16 may stay as they are: panels of PAIRS are [N / NR, K / 2, NR, 2].
//
// Where it has AMX, these are multiplied in its registers, by any number of rows; each 16 pairs are then two such chains
// as follow, whose total is added to the sum (amx.h).
//
// Each number of the result is one chain of multiply-adds in the order of k, which begins with the bias, whatever
// the number of rows, the row's place among them, the number of threads and, but for PAIRS, the length of vectors.
// That is what makes the result of a row independent of what it is batched with.
//
// Compiled by models/ops/cpu/products.py with the flags of the machine that it runs on.

#include <algorithm>
#include <cstdlib>

#include "amx.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 2, ROWS = 12;  // 24 sums, 2 weights and a broadcast in 32 registers
#elif defined(__AVX2__)
constexpr int VECTORS = 2, ROWS = 6;  // 12 sums, 2 weights and a broadcast in 16 registers
#else
constexpr int VECTORS = 4, ROWS = 6;  // 24 sums, 4 weights and a broadcast in 32 registers
#endif
constexpr int NR = LANES * VECTORS;  // outputs of a panel
constexpr long BLOCK = 1 << 14;      // bytes of a panel that stay in the first cache for all rows of x
constexpr long M_BLOCK = 16 * ROWS;  // rows of x that use them: their part takes at most 192 KiB of the second cache
constexpr long SUMS = 1 << 16;       // sums that stay there as well: 256 KiB
constexpr long PART_ROWS = 128;      // rows of a part, at least, of those that threads divide
constexpr long LINE = 64;            // bytes that a prefetch brings
constexpr long AHEAD = 8192;         // bytes between what few rows read and what is brought meanwhile
constexpr int PAIRS = INT8 + 1;      // a kind of panels, beside those of vectors.h

// One row k of a panel, as stored, the numbers of x by which it is multiplied, and those of y.
template <int KIND>
struct Panel;

struct OfFloats {
    typedef float Number;
    typedef float Result;
    typedef Vec Weights;
    static inline Vec add(Vec sum, Number a, Weights w) { return sum + a * w; }  // contracted to a fused multiply-add
    static inline void narrow(Result* p, const float* sums, long count) { std::memcpy(p, sums, sizeof(float) * count); }
};

template <>
struct Panel<FLOAT32> : OfFloats {
    typedef float Item;
    static constexpr long WORDS = NR;
    static inline void widen(const Item* p, Vec* w) {
        for (int v = 0; v < VECTORS; v++) w[v] = load(p + v * LANES);
    }
};

// Two bfloat16 share a word, output i of a pair of vectors in its low half and output i + LANES in its high half: a
// shift and a mask widen them.
template <>
struct Panel<BFLOAT16> : OfFloats {
    typedef uint32_t Item;
    static constexpr long WORDS = NR / 2;
    static inline void widen(const Item* p, Vec* w) {
        for (int v = 0; v < VECTORS; v += 2) {
            Bits both = *reinterpret_cast<const Bits*>(p + v / 2 * LANES);
            w[v] = (Vec)(both << 16);
            w[v + 1] = (Vec)(both & 0xffff0000u);
        }
    }
};

template <>
struct Panel<FLOAT16> : OfFloats {
    typedef uint16_t Item;
    static constexpr long WORDS = NR;
    static inline void widen(const Item* p, Vec* w) {
        for (int v = 0; v < VECTORS; v++) w[v] = Stored<FLOAT16>::widen(p + v * LANES);
    }
};

#if defined(HAS_PAIRS)
template <>
struct Panel<PAIRS> {
    typedef uint32_t Item;
    typedef uint32_t Number;
    typedef uint16_t Result;
    typedef Pairs Weights;
    static constexpr long WORDS = NR;
    static inline void widen(const Item* p, Weights* w) {
        for (int v = 0; v < VECTORS; v++) std::memcpy(w + v, p + v * LANES, sizeof(Weights));
    }
    static inline Vec add(Vec sum, Number a, Weights w) { return add_pairs(sum, as_pairs(Bits{} + a), w); }
    static inline void narrow(Result* p, const float* sums, long count) {
        for (long i = 0; i < count; i += LANES) narrow_some<BFLOAT16>(p + i, load(sums + i), count - i);
    }
};
#endif

// Adds R rows times `num` rows of a panel to the sums [R, NR]. x has a stride for rows and one for k. From `ahead`
// on, `step` bytes further for each k, what is read later is brought into the cache.
template <int R, int KIND>
void tile(const typename Panel<KIND>::Number* x, long row_stride, long k_stride, const typename Panel<KIND>::Item* p,
          long num, const char* ahead, long step, float* y) {
    typedef Panel<KIND> Stored;
    constexpr long BYTES = Stored::WORDS * sizeof(typename Stored::Item);
    Vec sums[R][VECTORS];  // in registers, which takes that each loop over them is unrolled
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(y + r * NR + v * LANES);
    for (long k = 0; k < num; k++) {
        typename Stored::Weights w[VECTORS];
        Stored::widen(p + k * Stored::WORDS, w);
        __builtin_prefetch(ahead + k * step, 0, 2);
        if (BYTES > LINE && step > LINE) __builtin_prefetch(ahead + k * step + LINE, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const auto a = x[r * row_stride + k * k_stride];
            for (int v = 0; v < VECTORS; v++) sums[r][v] = Stored::add(sums[r][v], a, w[v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(y + r * NR + v * LANES, sums[r][v]);
}

template <int KIND, int R = ROWS>
void tile_of(int rows, const typename Panel<KIND>::Number* x, long row_stride, long k_stride,
             const typename Panel<KIND>::Item* p, long num, const char* ahead, long step, float* y) {
    if (rows == R)
        tile<R, KIND>(x, row_stride, k_stride, p, num, ahead, step, y);
    else if constexpr (R > 1)
        tile_of<KIND, R - 1>(rows, x, row_stride, k_stride, p, num, ahead, step, y);
}

// First row of part i of n equal parts of m rows.
inline long part(long m, long n, long i) { return m * i / n; }

struct Product {
    const void* x;
    long x_stride, num_rows, num_inputs, num_outputs;  // inputs and strides are counted in numbers of the kind
    const void* panels;
    const float* bias;  // may be null
    void* y;
    long y_stride;
};

// Begins with a line of the cache; null where there is no memory.
template <typename Number>
Number* room_for(long items) {
    return static_cast<Number*>(std::aligned_alloc(64, (sizeof(Number) * items + 63) / 64 * 64));
}

// Sums [num_rows, NR] of a panel begin with the bias.
void begin(const Product& of, long panel, float* sums, long num_rows) {
    float first[NR] = {};
    const long count = std::min<long>(NR, of.num_outputs - panel * NR);
    if (of.bias) std::memcpy(first, of.bias + panel * NR, sizeof(float) * count);
    for (long r = 0; r < num_rows; r++) std::memcpy(sums + r * NR, first, sizeof(first));
}

template <typename Stored>
void finish(const Product& of, long panel, const float* sums, long from, long num_rows) {
    const long count = std::min<long>(NR, of.num_outputs - panel * NR);
    auto* y = static_cast<typename Stored::Result*>(of.y) + from * of.y_stride + panel * NR;
    for (long r = 0; r < num_rows; r++) Stored::narrow(y + r * of.y_stride, sums + r * NR, count);
}

// Panels first .. last of few rows: each weight is used once, and is widened where it is multiplied.
template <int KIND>
void few_rows(const Product& of, long first, long last) {
    typedef Panel<KIND> Stored;
    const auto* all = static_cast<const typename Stored::Item*>(of.panels);
    const auto* x = static_cast<const typename Stored::Number*>(of.x);
    float sums[ROWS * NR];
    for (long q = first; q < last; q++) {
        begin(of, q, sums, of.num_rows);
        const auto* p = all + q * of.num_inputs * Stored::WORDS;
        tile_of<KIND>(of.num_rows, x, of.x_stride, 1, p, of.num_inputs, reinterpret_cast<const char*>(p) + AHEAD,
                      Stored::WORDS * sizeof(*p), sums);
        finish<Stored>(of, q, sums, 0, of.num_rows);
    }
}

// Write `rows` rows of `num` numbers, which lie `stride` apart, number by number: [k, row]. Vectors are stored whole: what
// is too much is overwritten by the next number or tile, and lies in a vector's room behind the last.
void turn_tile(const uint32_t* x, long stride, long rows, long num, uint32_t* to) {
    constexpr int SQUARES = (ROWS + LANES - 1) / LANES;
    long k = 0;
    for (; k + LANES <= num; k += LANES) {
        Bits squares[SQUARES][LANES] = {};
#pragma GCC unroll 16
        for (int r = 0; r < SQUARES * LANES; r++)
            if (r < ROWS && r < rows) squares[r / LANES][r % LANES] = *reinterpret_cast<const Bits*>(x + r * stride + k);
#pragma GCC unroll 2
        for (int s = 0; s < SQUARES; s++) turn_square(squares[s]);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            for (int s = 0; s < SQUARES; s++)
                if (s * LANES < rows) *reinterpret_cast<Bits*>(to + (k + i) * rows + s * LANES) = squares[s][i];
    }
    for (; k < num; k++)
        for (long r = 0; r < rows; r++) to[k * rows + r] = x[r * stride + k];
}

// How many rows are multiplied by a panel: in vectors, by tiles of up to ROWS rows, of which all have about as many.
template <int KIND>
struct InVectors : Panel<KIND> {
    typedef Panel<KIND> Stored;
    static constexpr long MOST_ROWS = M_BLOCK;
    static long k_block(long) { return BLOCK / (Stored::WORDS * sizeof(typename Stored::Item)); }
    struct Registers {};
    static long kept_rows(long rows) { return rows; }
    static long kept_inputs(long num) { return num; }
    static long tiles_of(long rows) { return (rows + ROWS - 1) / ROWS; }
    static long first_of(long rows, long tile) { return part(rows, tiles_of(rows), tile); }
    static void turn(const typename Stored::Number* x, long stride, long rows, long num, typename Stored::Number* to) {
        static_assert(sizeof(*x) == sizeof(uint32_t));
        turn_tile(reinterpret_cast<const uint32_t*>(x), stride, rows, num, reinterpret_cast<uint32_t*>(to));
    }
    static void multiply(const typename Stored::Number* x, long rows, const typename Stored::Item* p, long num,
                         const char* ahead, long step, float* y) {
        tile_of<KIND>(rows, x, 1, rows, p, num, ahead, step, y);
    }
};

#if defined(HAS_AMX)
// In AMX's registers, by tiles of up to 32 rows: what is missing in the last 16 rows and in the last 16 pairs is zeros.
struct InAmx : Panel<PAIRS> {
    static constexpr long MOST_ROWS = 512;
    // Of few rows, which lie in the first cache beside a block, sums take less of it than a longer block would
    static long k_block(long rows) { return (rows > 64 ? BLOCK : BLOCK / 2) / (Panel<PAIRS>::WORDS * sizeof(Item)); }
    typedef AmxRegisters Registers;
    static_assert(NR == 2 * AMX_WORDS);
    static long kept_rows(long rows) { return (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS; }
    static long kept_inputs(long num) { return (num + AMX_WORDS - 1) / AMX_WORDS * AMX_WORDS; }
    static long tiles_of(long rows) { return (rows + 2 * AMX_ROWS - 1) / (2 * AMX_ROWS); }
    static long first_of(long rows, long tile) { return std::min(2 * AMX_ROWS * tile, rows); }
    // [rows / 16, num / 16, 16 rows, 16 pairs], whole.
    static void turn(const uint32_t* x, long stride, long rows, long num, uint32_t* to) {
        for (long from = 0; from < rows; from += AMX_ROWS)
            for (long k = 0; k < num; k += AMX_WORDS)
                for (long r = from; r < from + AMX_ROWS; r++, to += AMX_WORDS) {
                    const long count = r < rows ? std::min(AMX_WORDS, num - k) : 0;
                    if (count == AMX_WORDS) {
                        std::memcpy(to, x + r * stride + k, sizeof(*to) * AMX_WORDS);
                        continue;
                    }
                    std::memset(to, 0, sizeof(*to) * AMX_WORDS);
                    if (count) std::memcpy(to, x + r * stride + k, sizeof(*to) * count);
                }
    }
    // Sums [rows, 32] of one or of two times 16 rows in four registers, those of x in two more and of the panel in two.
    template <bool IS_PAIR>
    static void add(const uint32_t* x, const uint32_t* p, long num, const char* ahead, long step, float* y) {
        constexpr long BYTES = NR * sizeof(float);
        const uint32_t* second = x + kept_inputs(num) * AMX_ROWS;
        float* below = y + AMX_ROWS * NR;
        uint32_t last[AMX_WORDS * NR];
        amx_memory();
        _tile_loadd(0, y, BYTES);
        _tile_loadd(1, y + AMX_WORDS, BYTES);
        if constexpr (IS_PAIR) {
            _tile_loadd(2, below, BYTES);
            _tile_loadd(3, below + AMX_WORDS, BYTES);
        }
        for (long k = 0; k < num; k += AMX_WORDS) {
            const uint32_t* words = p + k * NR;
            if (num - k < AMX_WORDS) {
                std::memset(last, 0, sizeof(last));
                std::memcpy(last, words, sizeof(*last) * NR * (num - k));
                words = last;
                amx_memory();
            }
            _tile_loadd(6, words, BYTES);
            _tile_loadd(7, words + AMX_WORDS, BYTES);
            _tile_loadd(4, x + k * AMX_ROWS, 4 * AMX_WORDS);
            for (long byte = 0; byte < AMX_WORDS * step; byte += LINE)
                __builtin_prefetch(ahead + k * step + byte, 0, 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (IS_PAIR) {
                _tile_loadd(5, second + k * AMX_ROWS, 4 * AMX_WORDS);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, y, BYTES);
        _tile_stored(1, y + AMX_WORDS, BYTES);
        if constexpr (IS_PAIR) {
            _tile_stored(2, below, BYTES);
            _tile_stored(3, below + AMX_WORDS, BYTES);
        }
    }
    static void multiply(const uint32_t* x, long rows, const uint32_t* p, long num, const char* ahead, long step,
                         float* y) {
        (rows > AMX_ROWS ? add<true> : add<false>)(x, p, num, ahead, step, y);
    }
};
#endif

// Write rows m0 .. m0 + mc of x in the order in which tiles read them: [block of k, tile, what a tile turns].
template <typename Way>
void turn(const Product& of, long m0, long mc, typename Way::Number* turned) {
    const long kept = Way::kept_rows(mc), block = Way::k_block(mc);
    for (long k0 = 0; k0 < of.num_inputs; k0 += block) {
        const long kc = std::min(block, of.num_inputs - k0);
        for (long t = 0; t < Way::tiles_of(mc); t++) {
            const long from = Way::first_of(mc, t), rows = Way::first_of(mc, t + 1) - from;
            const auto* x = static_cast<const typename Way::Number*>(of.x) + (m0 + from) * of.x_stride + k0;
            Way::turn(x, of.x_stride, rows, kc, turned + k0 * kept + from * Way::kept_inputs(kc));
        }
    }
}

// Panels first .. last of many rows: a block of a panel stays in the first cache for all rows of a block, and each of
// their tiles brings its share of the next block. The part of x and the sums of a group of panels stay in the second.
// Returns false where there is no memory for them.
template <typename Way>
bool many_rows(const Product& of, long first, long last) {
    constexpr long BYTES = Way::WORDS * sizeof(typename Way::Item);
    const auto* all = static_cast<const typename Way::Item*>(of.panels);
    const long most_rows = Way::kept_rows(std::min(Way::MOST_ROWS, of.num_rows));
    const long group = std::max(1L, SUMS / (most_rows * NR));
    auto* turned = room_for<typename Way::Number>(most_rows * Way::kept_inputs(of.num_inputs) + LANES);
    float* sums = room_for<float>(std::min(group, last - first) * most_rows * NR);
    const bool has_memory = turned && sums;
    [[maybe_unused]] const typename Way::Registers registers;
    for (long m0 = 0; has_memory && m0 < of.num_rows; m0 += Way::MOST_ROWS) {
        const long mc = std::min(Way::MOST_ROWS, of.num_rows - m0), kept = Way::kept_rows(mc);
        const long tiles = Way::tiles_of(mc), step = BYTES / tiles, block = Way::k_block(mc);
        turn<Way>(of, m0, mc, turned);
        for (long q0 = first; q0 < last; q0 += group) {
            const long q1 = std::min(q0 + group, last);
            for (long k0 = 0; k0 < of.num_inputs; k0 += block) {
                const long kc = std::min(block, of.num_inputs - k0);
                for (long q = q0; q < q1; q++) {
                    const auto* p = all + (q * of.num_inputs + k0) * Way::WORDS;
                    const long then = q + 1 < q1                ? (q + 1) * of.num_inputs + k0
                                      : k0 + kc < of.num_inputs ? q0 * of.num_inputs + k0 + kc
                                                                : q1 * of.num_inputs;
                    const char* next = reinterpret_cast<const char*>(all + then * Way::WORDS);
                    for (long t = 0; t < tiles; t++) {
                        const long from = Way::first_of(mc, t), rows = Way::first_of(mc, t + 1) - from;
                        float* own = sums + ((q - q0) * kept + from) * NR;
                        if (k0 == 0) begin(of, q, own, Way::kept_rows(rows));
                        Way::multiply(turned + k0 * kept + from * Way::kept_inputs(kc), rows, p, kc,
                                      next + t * kc * step, step, own);
                        if (k0 + kc == of.num_inputs) finish<Way>(of, q, own, m0 + from, rows);
                    }
                }
            }
        }
    }
    std::free(turned);
    std::free(sums);
    return has_memory;
}

template <int KIND>
bool panels_of(const Product& of, long first, long last) {
    if (of.num_rows > ROWS) return first == last || many_rows<InVectors<KIND>>(of, first, last);
    few_rows<KIND>(of, first, last);
    return true;
}

bool panels_of_kind(int kind, const Product& of, long first, long last) {
    if (kind == FLOAT32) return panels_of<FLOAT32>(of, first, last);
    if (kind == BFLOAT16) return panels_of<BFLOAT16>(of, first, last);
#if defined(HAS_AMX)
    if (kind == PAIRS && may_use_amx()) return first == last || many_rows<InAmx>(of, first, last);
#endif
#if defined(HAS_PAIRS)
    if (kind == PAIRS) return panels_of<PAIRS>(of, first, last);
#endif
    return panels_of<FLOAT16>(of, first, last);
}

// Into how many parts rows are divided; the threads of a part divide its panels. Of PART_ROWS rows and more, reading a
// panel in several threads costs less than turning all rows in each, and a thread then reads what it wrote itself, since
// operators of single rows are divided by rows, too.
long parts_of_rows(long num_rows, long num_threads) {
    long parts = std::max(1L, std::min(num_threads, num_rows / PART_ROWS));
    while (num_threads % parts) parts--;
    return parts;
}

// Rows first .. last of a product.
Product rows_of(Product of, long first, long last, int kind) {
    of.x = static_cast<const uint32_t*>(of.x) + first * of.x_stride;  // a float32 or a pair
    of.y = static_cast<char*>(of.y) + first * of.y_stride * (kind == PAIRS ? sizeof(uint16_t) : sizeof(float));
    of.num_rows = last - first;
    return of;
}

}  // namespace

extern "C" {

long outputs_of_a_panel() { return NR; }

// The number of the kind PAIRS, or -1 where this processor does not multiply them.
int kind_of_pairs() {
#if defined(HAS_PAIRS)
    return PAIRS;
#else
    return -1;
#endif
}

// Pack w [N, K], items of 2 or 4 bytes, into panels; `packed` has room for N rounded up to whole panels.
void pack(const void* w, void* packed, long num_outputs, long num_inputs, int kind) {
    const long panels = (num_outputs + NR - 1) / NR;
#pragma omp parallel for
    for (long q = 0; q < panels; q++) {
        const long count = std::min<long>(NR, num_outputs - q * NR);
        for (long k = 0; k < num_inputs; k++) {
            for (long i = 0; i < NR; i++) {
                const long from = (q * NR + i) * num_inputs + k, row = (q * num_inputs + k) * NR;
                if (kind == FLOAT32) {
                    static_cast<float*>(packed)[row + i] = i < count ? static_cast<const float*>(w)[from] : 0.0f;
                    continue;
                }
                long to = row + i;
                if (kind == BFLOAT16) {
                    const long pair = i / (2 * LANES), high = i / LANES % 2, lane = i % LANES;
                    to = row + pair * 2 * LANES + 2 * lane + high;
                }
                if (kind == PAIRS) to = ((q * num_inputs + k) / 2 * NR + i) * 2 + k % 2;
                static_cast<uint16_t*>(packed)[to] = i < count ? static_cast<const uint16_t*>(w)[from] : 0;
            }
        }
    }
}

// y [M, N] = bias [N] + x [M, K] w [N, K]^T; strides are those of rows, in items. Of PAIRS, x and y are bfloat16, and
// K and the stride of x are even. Returns false where there is no memory for it.
bool multiply(const void* x, long x_stride, const void* panels, const float* bias, void* y, long y_stride,
              long num_rows, long num_outputs, long num_inputs, int kind, int num_threads) {
    const long together = kind == PAIRS ? 2 : 1;
    const Product of = {x, x_stride / together, num_rows, num_inputs / together, num_outputs, panels, bias, y, y_stride};
    const long count = (num_outputs + NR - 1) / NR;
    if (num_rows == 0) return true;
    if (num_threads == 1) return panels_of_kind(kind, of, 0, count);
    const long row_parts = parts_of_rows(num_rows, num_threads), column_parts = num_threads / row_parts;
    bool has_memory = true;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) reduction(&& : has_memory)
    for (int t = 0; t < num_threads; t++) {  // a thread may compute several parts, and any of them may fail
        const long r = t / column_parts, c = t % column_parts;
        const Product own = rows_of(of, part(num_rows, row_parts, r), part(num_rows, row_parts, r + 1), kind);
        has_memory &= panels_of_kind(kind, own, part(count, column_parts, c), part(count, column_parts, c + 1));
    }
    return has_memory;
}
}
