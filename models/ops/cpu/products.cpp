// Products of float32 rows with weights that are stored in bfloat16, float16 or float32.
//
// A weight [N, K] is packed once in panels of NR outputs, [N / NR, K, NR], in the type in which it is stored; the
// outputs that are missing in the last panel are zeros. Stored numbers are widened to float32 exactly, in
// registers, so the product is the float32 product of the same numbers, at half of the bytes.
//
// Each number of the result is one chain of fused multiply-adds in the order of k, which begins with the bias,
// whatever the number of rows, the row's place among them, the number of threads and the length of vectors.
// That is what makes the result of a row independent of what it is batched with.
//
// Compiled by models/ops/cpu/products.py with the flags of the machine that it runs on. Vectors are the
// compiler's own, so that the same source serves AVX2, AVX-512 and NEON.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, ROWS = 12;  // 24 sums, 2 weights and a broadcast in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 6;  // 12 sums, 2 weights and a broadcast in 16 registers
#else
constexpr int LANES = 4, VECTORS = 4, ROWS = 6;  // 24 sums, 4 weights and a broadcast in 32 registers
#endif
constexpr int NR = LANES * VECTORS;  // outputs of a panel
constexpr long K_BLOCK = 256;        // rows of a panel that stay in the first cache for all rows of x: at most 32 KiB
constexpr long M_BLOCK = 16 * ROWS;  // rows of x that use them: their part takes at most 192 KiB of the second cache
constexpr long SUMS = 1 << 16;       // sums that stay there as well: 256 KiB
constexpr long LINE = 64;            // bytes that a prefetch brings

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// One row k of a panel, as stored. Two bfloat16 share a word, output i of a pair of vectors in its low half and
// output i + LANES in its high half: a shift and a mask widen them.
template <Kind KIND>
struct Panel;

template <>
struct Panel<FLOAT32> {
    typedef float Item;
    static constexpr long WORDS = NR;
    static inline void widen(const Item* p, Vec* w) {
        for (int v = 0; v < VECTORS; v++) w[v] = load(p + v * LANES);
    }
};

template <>
struct Panel<BFLOAT16> {
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
struct Panel<FLOAT16> {
    typedef uint16_t Item;
    static constexpr long WORDS = NR;
    static inline void widen(const Item* p, Vec* w) {
        for (int v = 0; v < VECTORS; v++) {
            const Item* at = p + v * LANES;
#if defined(__AVX512F__)
            w[v] = (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
            w[v] = (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
            w[v] = (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#endif
        }
    }
};

// Adds R rows times `num` rows of a panel to the sums [R, NR]. x has a stride for rows and one for k. What lies as
// far behind `ahead` as what is read lies behind `p` is brought into the cache meanwhile, unless it is null.
template <int R, Kind KIND>
void tile(const float* x, long row_stride, long k_stride, const typename Panel<KIND>::Item* p, long num,
          const typename Panel<KIND>::Item* ahead, float* y) {
    typedef Panel<KIND> Stored;
    constexpr long STEP = LINE / sizeof(typename Stored::Item);
    Vec sums[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(y + r * NR + v * LANES);
    for (long k = 0; k < num; k++) {
        Vec w[VECTORS];
        Stored::widen(p + k * Stored::WORDS, w);
        if (ahead)
            for (long i = 0; i < Stored::WORDS; i += STEP) __builtin_prefetch(ahead + k * Stored::WORDS + i, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float a = x[r * row_stride + k * k_stride];
            for (int v = 0; v < VECTORS; v++) sums[r][v] += a * w[v];  // contracted to fused multiply-adds
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(y + r * NR + v * LANES, sums[r][v]);
}

template <Kind KIND, int R = ROWS>
void tile_of(int rows, const float* x, long row_stride, long k_stride, const typename Panel<KIND>::Item* p, long num,
             const typename Panel<KIND>::Item* ahead, float* y) {
    if (rows == R)
        tile<R, KIND>(x, row_stride, k_stride, p, num, ahead, y);
    else if constexpr (R > 1)
        tile_of<KIND, R - 1>(rows, x, row_stride, k_stride, p, num, ahead, y);
}

// First row of part i of n equal parts of m rows.
inline long part(long m, long n, long i) { return m * i / n; }

struct Product {
    const float* x;
    long x_stride, num_rows, num_inputs, num_outputs;
    const void* panels;
    const float* bias;  // may be null
    float* y;
    long y_stride;
};

float* room_for(long items) {
    return static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * items + 63) / 64 * 64));
}

// Sums [num_rows, NR] of a panel begin with the bias.
void begin(const Product& of, long panel, float* sums, long num_rows) {
    float first[NR] = {};
    const long count = std::min<long>(NR, of.num_outputs - panel * NR);
    if (of.bias) std::memcpy(first, of.bias + panel * NR, sizeof(float) * count);
    for (long r = 0; r < num_rows; r++) std::memcpy(sums + r * NR, first, sizeof(first));
}

void finish(const Product& of, long panel, const float* sums, long from, long num_rows) {
    const long count = std::min<long>(NR, of.num_outputs - panel * NR);
    float* y = of.y + from * of.y_stride + panel * NR;
    for (long r = 0; r < num_rows; r++) std::memcpy(y + r * of.y_stride, sums + r * NR, sizeof(float) * count);
}

// Panels first .. last of few rows: each weight is used once, and is widened where it is multiplied.
template <Kind KIND>
void few_rows(const Product& of, long first, long last) {
    const auto* all = static_cast<const typename Panel<KIND>::Item*>(of.panels);
    float sums[ROWS * NR];
    for (long q = first; q < last; q++) {
        begin(of, q, sums, of.num_rows);
        const auto* p = all + q * of.num_inputs * Panel<KIND>::WORDS;
        tile_of<KIND>(of.num_rows, of.x, of.x_stride, 1, p, of.num_inputs, nullptr, sums);
        finish(of, q, sums, 0, of.num_rows);
    }
}

// Write rows m0 .. m0 + mc of x in the order in which tiles read them: [block of k, tile, k, row of the tile].
void turn(const Product& of, long m0, long mc, long tiles, float* turned) {
    for (long k0 = 0; k0 < of.num_inputs; k0 += K_BLOCK) {
        const long kc = std::min(K_BLOCK, of.num_inputs - k0);
        for (long t = 0; t < tiles; t++) {
            const long from = part(mc, tiles, t), rows = part(mc, tiles, t + 1) - from;
            const float* x = of.x + (m0 + from) * of.x_stride + k0;
            float* to = turned + k0 * mc + from * kc;
            for (long k = 0; k < kc; k++)
                for (long r = 0; r < rows; r++) to[k * rows + r] = x[r * of.x_stride + k];
        }
    }
}

// Panels first .. last of many rows: a block of a panel stays in the first cache for all rows of a block. The part of
// x and the sums of a group of panels stay in the second.
template <Kind KIND>
void many_rows(const Product& of, long first, long last) {
    typedef Panel<KIND> Stored;
    const auto* all = static_cast<const typename Stored::Item*>(of.panels);
    const long most_rows = std::min(M_BLOCK, of.num_rows), group = std::max(1L, SUMS / (most_rows * NR));
    float* turned = room_for(most_rows * of.num_inputs);
    float* sums = room_for(std::min(group, last - first) * most_rows * NR);
    for (long m0 = 0; m0 < of.num_rows; m0 += M_BLOCK) {
        const long mc = std::min(M_BLOCK, of.num_rows - m0), tiles = (mc + ROWS - 1) / ROWS;
        turn(of, m0, mc, tiles, turned);
        for (long q0 = first; q0 < last; q0 += group) {
            const long q1 = std::min(q0 + group, last);
            for (long q = q0; q < q1; q++) begin(of, q, sums + (q - q0) * mc * NR, mc);
            for (long k0 = 0; k0 < of.num_inputs; k0 += K_BLOCK) {
                const long kc = std::min(K_BLOCK, of.num_inputs - k0);
                for (long q = q0; q < q1; q++) {
                    const auto* p = all + (q * of.num_inputs + k0) * Stored::WORDS;
                    const auto* next = q + 1 < q1 ? p + of.num_inputs * Stored::WORDS : nullptr;
                    for (long t = 0; t < tiles; t++) {
                        const long from = part(mc, tiles, t), rows = part(mc, tiles, t + 1) - from;
                        tile_of<KIND>(rows, turned + k0 * mc + from * kc, 1, rows, p, kc, t ? nullptr : next,
                                      sums + ((q - q0) * mc + from) * NR);
                    }
                }
            }
            for (long q = q0; q < q1; q++) finish(of, q, sums + (q - q0) * mc * NR, m0, mc);
        }
    }
    std::free(turned);
    std::free(sums);
}

template <Kind KIND>
void panels_of(const Product& of, long first, long last) {
    if (of.num_rows <= ROWS)
        few_rows<KIND>(of, first, last);
    else
        many_rows<KIND>(of, first, last);
}

void panels_of_kind(int kind, const Product& of, long first, long last) {
    if (kind == FLOAT32) panels_of<FLOAT32>(of, first, last);
    if (kind == BFLOAT16) panels_of<BFLOAT16>(of, first, last);
    if (kind == FLOAT16) panels_of<FLOAT16>(of, first, last);
}

}  // namespace

extern "C" {

long outputs_of_a_panel() { return NR; }

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
                static_cast<uint16_t*>(packed)[to] = i < count ? static_cast<const uint16_t*>(w)[from] : 0;
            }
        }
    }
}

// y [M, N] = bias [N] + x [M, K] w [N, K]^T; strides are those of rows, in items.
void multiply(const float* x, long x_stride, const void* panels, const float* bias, float* y, long y_stride,
              long num_rows, long num_outputs, long num_inputs, int kind, int num_threads) {
    const Product of = {x, x_stride, num_rows, num_inputs, num_outputs, panels, bias, y, y_stride};
    const long count = (num_outputs + NR - 1) / NR;
    if (num_threads == 1) {
        panels_of_kind(kind, of, 0, count);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
    for (int t = 0; t < num_threads; t++)
        panels_of_kind(kind, of, part(count, num_threads, t), part(count, num_threads, t + 1));
}
}
