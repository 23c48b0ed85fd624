// Float32 vectors of the machine's length, and their conversion from and to numbers stored in 8, 16 or 32 bits.
//
// The vectors are the compiler's own vector types, so that one source serves AVX2, AVX-512 and NEON.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

// The numbers are those of KINDS in devices/cpp_sources.py; INT8 is for pages of int8 (attention/cpu/compiled.py),
// whose scales lie beside the numbers.
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8 };

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// Loads LANES numbers of 16 bits into the low halves of words, by one instruction: compilers convert such a vector in
// parts.
inline Bits words(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits);
#endif
}

inline Bits words_of(Halves halves) {
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32((__m256i)halves);
#else
    return __builtin_convertvector(halves, Bits);
#endif
}

// Pairs of bfloat16. Some processors multiply two pairs and add both products to a float32 (AVX512-BF16, Arm's BF16).
#if defined(__AVX512BF16__)
#define HAS_PAIRS
typedef __m512bh Pairs;
inline Pairs as_pairs(Bits words) { return (Pairs)words; }
inline Vec add_pairs(Vec sum, Pairs a, Pairs b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
inline Halves rounded(Vec v) { return (Halves)_mm512_cvtneps_pbh((__m512)v); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS
typedef bfloat16x8_t Pairs;
inline Pairs as_pairs(Bits words) { return vreinterpretq_bf16_u32((uint32x4_t)words); }
inline Vec add_pairs(Vec sum, Pairs a, Pairs b) { return (Vec)vbfdotq_f32((float32x4_t)sum, a, b); }
inline Halves rounded(Vec v) { return (Halves)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)v)); }
#endif

// How numbers of a kind are stored. `widen` is exact; `narrow` rounds to the nearest, and ties to even; `through` returns
// numbers as they are once they were stored. Where x86 itself rounds to bfloat16, numbers under 2^-126 become zeros.
template <Kind KIND>
struct Stored {
    typedef uint16_t Item;
    static inline Vec widen(const Item* p) {
        if constexpr (KIND == BFLOAT16) {
            return (Vec)(words(p) << 16);
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
    static inline void narrow(Item* p, Vec v) {
        if constexpr (KIND == BFLOAT16) {
#if defined(HAS_PAIRS)
            *reinterpret_cast<Halves*>(p) = rounded(v);
#else
            const Bits bits = (Bits)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            const Ints is_nan = v != v;
            *reinterpret_cast<Halves*>(p) =
                __builtin_convertvector((Bits)(is_nan ? (Ints)((bits >> 16) | 0x40u) : (Ints)rounded), Halves);
#endif
        } else {
#if defined(__AVX512F__)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
            vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#endif
        }
    }
    static inline Vec through(Vec v) {
        Item some[LANES];
        narrow(some, v);
        return widen(some);
    }
};

template <>
struct Stored<FLOAT32> {
    typedef float Item;
    static inline Vec widen(const Item* p) { return load(p); }
    static inline void narrow(Item* p, Vec v) { store(p, v); }
    static inline Vec through(Vec v) { return v; }
};

template <>
struct Stored<INT8> {
    typedef int8_t Item;
    static inline Vec widen(const Item* p) {
#if defined(__AVX512F__)
        return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
        return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
        int32_t four;
        std::memcpy(&four, p, sizeof four);
        return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#endif
    }
};

// Loads a vector of `count` numbers, of which there may be fewer than LANES; the missing ones are zeros.
template <Kind KIND>
inline Vec widen_some(const typename Stored<KIND>::Item* p, long count) {
    if (count >= LANES) return Stored<KIND>::widen(p);
    typename Stored<KIND>::Item some[LANES] = {};
    std::memcpy(some, p, sizeof(*p) * count);
    return Stored<KIND>::widen(some);
}

template <Kind KIND>
inline void narrow_some(typename Stored<KIND>::Item* p, Vec v, long count) {
    if (count >= LANES) {
        Stored<KIND>::narrow(p, v);
        return;
    }
    typename Stored<KIND>::Item some[LANES];
    Stored<KIND>::narrow(some, v);
    std::memcpy(p, some, sizeof(*p) * count);
}

// Rotates the lanes of a vector by some places.
inline Vec turned(Vec v, int places) {
    alignas(64) static constexpr int32_t LANE[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    return __builtin_shuffle(v, *reinterpret_cast<const Ints*>(LANE + places));  // counted modulo LANES
}

// Transposes a square of LANES vectors of 32-bit numbers: number j of vector i becomes number i of vector j. Each level
// treats one bit DISTANCE of the indices: of two vectors that are DISTANCE apart, the first swaps its numbers at lanes
// with that bit for the second's numbers at lanes without it.
template <int DISTANCE = LANES / 2, typename Vector>
inline void turn_square(Vector* square) {
    Ints of_first, of_second;
    for (int lane = 0; lane < LANES; lane++) {
        of_first[lane] = lane & DISTANCE ? LANES + lane - DISTANCE : lane;
        of_second[lane] = lane & DISTANCE ? LANES + lane : lane + DISTANCE;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & DISTANCE) continue;
        const Vector first = square[i], second = square[i + DISTANCE];
        square[i] = __builtin_shuffle(first, second, of_first);
        square[i + DISTANCE] = __builtin_shuffle(first, second, of_second);
    }
    if constexpr (DISTANCE > 1) turn_square<DISTANCE / 2>(square);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float total_of(Vec v) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) v += turned(v, half);
    return v[0];
}

inline float largest_of(Vec v) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) v = larger(turned(v, half), v);
    return v[0];
}

// e^x, correct but for the last bit (Cephes, expf). Numbers below -87 and -infinity give 0, numbers above 88 infinity.
template <bool IS_POSITIVE_TOO = true>
inline Vec exponential(Vec x) {
    const Vec shifted = x * 1.44269504f + 12582912.0f;  // the nearest whole number, in its last bits
    const Vec count = shifted - 12582912.0f;
    Vec rest = x - count * 0.693359375f;
    rest = rest + count * 2.12194440e-4f;
    Vec sum = Vec{} + 1.9875691500e-4f;
    for (const float each : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + each;
    const Vec fraction = sum * (rest * rest) + rest + 1.0f;
    const Vec power = (Vec)(((Bits)shifted << 23) + (127u << 23));
    const Vec found = x < -87.0f ? Vec{} : fraction * power;
    if constexpr (!IS_POSITIVE_TOO) return found;
    return x > 88.0f ? Vec{} + __builtin_inff() : found;
}

constexpr float LOG2_E = 1.44269504f;

// 2^x for x up to 0, or a rounding more, with a relative error of 3 parts in a million: a polynomial approximates it
// between whole numbers, with the least maximal error. What is under 2^-126, and 0 in bfloat16, is 0: the processor
// takes some hundred cycles for a vector in which it makes such a number, as of each token that a query does not see.
inline Vec rough_power(Vec x) {
#if defined(__AVX512F__)
    const Vec count = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec rest = x - count;
    Vec sum = Vec{} + 0.00957010165f;
    for (const float each : {0.0559178621f, 0.240247448f, 0.693121815f, 0.999999261f}) sum = sum * rest + each;
    const __mmask16 is_made = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or is NaN
    return (Vec)_mm512_maskz_scalef_ps(is_made, (__m512)sum, (__m512)count);
#else
    return exponential<false>(x * (1.0f / LOG2_E));
#endif
}

// 1 / (1 + e^-x) to 4 parts in a million; what is 0 in bfloat16 is 0, but for numbers between -88 and -87.
inline Vec rough_sigmoid(Vec x) {
#if defined(__AVX512F__)
    const Vec part = rough_power((x > 0.0f ? -x : x) * LOG2_E), divisor = 1.0f + part;
    const Vec rough = (Vec)_mm512_rcp14_ps((__m512)divisor), inverse = rough * (2.0f - divisor * rough);
    return x < -87.0f ? Vec{} : (x > 0.0f ? Vec{} + 1.0f : part) * inverse;
#else
    return 1.0f / (1.0f + exponential(-x));
#endif
}
