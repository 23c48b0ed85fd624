// Operators that compute each row, or each number, by itself: norms, rotary, gates, a router's scores and the greedy
// choice.
//
// A row's result depends on no other row, on no thread and on no place: numbers behind the last whole vector are
// computed in a vector too, whose rest is not stored. Numbers are stored in float32, bfloat16 or float16, computed in
// float32 and rounded where plain torch rounds last.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace {

constexpr long SMALL = 1 << 15;  // numbers under which one thread is as fast as several

// As precise as numbers of the kind are.
template <Kind KIND>
inline Vec sigmoid(Vec x) {
    return KIND == BFLOAT16 ? rough_sigmoid(x) : 1.0f / (1.0f + exponential(-x));
}

// y = norm(x) * weight, or of the sum of x and `residual`, which is then written to `total`.
template <Kind KIND>
void normed(const void* x_, const void* residual_, const void* weight_, void* y_, void* total_, long rows, long width,
            float eps, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *residual = static_cast<const Item*>(residual_);
    const Item* weight = static_cast<const Item*>(weight_);
    Item *y = static_cast<Item*>(y_), *total = static_cast<Item*>(total_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width > SMALL)
    for (long r = 0; r < rows; r++) {
        const Item* own = residual ? total + r * width : x + r * width;
        Vec squares = {};
        for (long i = 0; i < width; i += LANES) {
            Vec each = widen_some<KIND>(x + r * width + i, width - i);
            if (residual) {
                each = Stored<KIND>::through(each + widen_some<KIND>(residual + r * width + i, width - i));
                narrow_some<KIND>(total + r * width + i, each, width - i);
            }
            squares += each * each;
        }
        const float scale = 1.0f / std::sqrt(total_of(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) {
            // The norm is rounded before it is weighed
            const Vec norm = Stored<KIND>::through(widen_some<KIND>(own + i, width - i) * scale);
            narrow_some<KIND>(y + r * width + i, widen_some<KIND>(weight + i, width - i) * norm, width - i);
        }
    }
}

// x [T, H, D] with strides of rows and heads is turned by cos and sin [T, D], whose halves are equal, to y [T, H, D].
template <Kind KIND>
void turned(const void* x_, const void* cos_, const void* sin_, void* y_, long rows, long heads, long dim,
            long row_stride, long head_stride, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *cos = static_cast<const Item*>(cos_);
    const Item* sin = static_cast<const Item*>(sin_);
    Item* y = static_cast<Item*>(y_);
    const long half = dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * heads * dim > SMALL)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const Item* from = x + r * row_stride + h * head_stride;
            Item* to = y + (r * heads + h) * dim;
            for (long i = 0; i < half; i += LANES) {
                const long left = half - i;
                const Vec c = widen_some<KIND>(cos + r * dim + i, left), s = widen_some<KIND>(sin + r * dim + i, left);
                const Vec first = widen_some<KIND>(from + i, left), second = widen_some<KIND>(from + half + i, left);
                narrow_some<KIND>(to + i, first * c - second * s, left);
                narrow_some<KIND>(to + half + i, second * c + first * s, left);
            }
        }
}

// The logarithm of 1 + e^x. That of 1 + u, for u up to 1, is 2 artanh(u / (2 + u)), a series in at most 1 / 9.
inline Vec softplus(Vec x) {
    const Vec part = exponential(x > 0.0f ? -x : x), ratio = part / (2.0f + part), square = ratio * ratio;
    Vec sum = Vec{} + 1.0f / 17.0f;
    for (int odd = 15; odd > 0; odd -= 2) sum = sum * square + 1.0f / odd;
    return (x > 0.0f ? x : Vec{}) + 2.0f * ratio * sum;
}

enum Curve { SIGMOID, SOFTPLUS };

template <Kind KIND>
void curved(Curve curve, const void* x_, void* y_, long count, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* x = static_cast<const Item*>(x_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count > SMALL)
    for (long i = 0; i < count; i += LANES) {
        const Vec each = widen_some<KIND>(x + i, count - i);
        narrow_some<KIND>(y + i, curve == SIGMOID ? sigmoid<KIND>(each) : softplus(each), count - i);
    }
}

// y [T, O] = x [T, I] weight [O, I], whose products are summed in one order, plus the bias [O] in float32.
template <Kind KIND>
void scored(const void* x_, const void* weight_, const float* bias, void* y_, long rows, long width, long outputs,
            int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *weight = static_cast<const Item*>(weight_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width * outputs > SMALL)
    for (long place = 0; place < rows * outputs; place++) {
        const Item *own = x + place / outputs * width, *by = weight + place % outputs * width;
        Vec products = {};
        for (long i = 0; i < width; i += LANES)
            products += widen_some<KIND>(own + i, width - i) * widen_some<KIND>(by + i, width - i);
        narrow_some<KIND>(y + place, Vec{} + total_of(products) + (bias ? bias[place % outputs] : 0.0f), 1);
    }
}

// The shares of e^x in the sum of a row's, of rows [T, W] in float32.
void shared_out(const float* x, float* y, long rows, long width) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        float top = x[0];
        for (long i = 1; i < width; i++) top = x[i] > top ? x[i] : top;
        for (long i = 0; i < width; i += LANES)
            narrow_some<FLOAT32>(y + i, exponential(widen_some<FLOAT32>(x + i, width - i) - top), width - i);
        Vec sums = {};
        for (long i = 0; i < width; i += LANES) sums += widen_some<FLOAT32>(y + i, width - i);
        const float sum = total_of(sums);
        for (long i = 0; i < width; i++) y[i] /= sum;
    }
}

enum Gate { SILU, GELU, CLAMPED };

template <Kind KIND>
inline Vec opened(Gate gate, Vec x, Vec up, float slope, float limit) {
    if (gate == SILU) return x * sigmoid<KIND>(x) * up;
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y
    if (gate == GELU) return x * sigmoid<KIND>(1.5957691216f * (x + 0.044715f * x * x * x)) * up;
    const Vec most = Vec{} + limit, least = Vec{} - limit;
    x = x > most ? most : x;
    up = up > most ? most : up < least ? least : up;
    return (up + 1.0f) * (x * sigmoid<KIND>(slope * x));
}

template <Kind KIND>
void gated(Gate gate, const void* x_, void* y_, long rows, long width, float slope, float limit, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* x = static_cast<const Item*>(x_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * width > SMALL)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) {
            const Vec shut = widen_some<KIND>(x + 2 * r * width + i, width - i);
            const Vec up = widen_some<KIND>(x + (2 * r + 1) * width + i, width - i);
            narrow_some<KIND>(y + r * width + i, opened<KIND>(gate, shut, up, slope, limit), width - i);
        }
}

// y = norm(x) * weight * opened(gate) of x [T, H, W], rounded once; tokens of the gate have a stride of their own.
template <Kind KIND>
void gated_normed(const void* x_, const void* gate_, const void* weight_, void* y_, long tokens, long heads, long width,
                  long gate_stride, float eps, bool is_silu, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item *x = static_cast<const Item*>(x_), *gate = static_cast<const Item*>(gate_);
    const Item* weight = static_cast<const Item*>(weight_);
    Item* y = static_cast<Item*>(y_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && tokens * heads * width > SMALL)
    for (long r = 0; r < tokens * heads; r++) {
        const Item *own = x + r * width, *shut = gate + r / heads * gate_stride + r % heads * width;
        Vec squares = {};
        for (long i = 0; i < width; i += LANES) {
            const Vec each = widen_some<KIND>(own + i, width - i);
            squares += each * each;
        }
        const float scale = 1.0f / std::sqrt(total_of(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) {
            const Vec by = widen_some<KIND>(shut + i, width - i), open = is_silu ? by * sigmoid<KIND>(by) : sigmoid<KIND>(by);
            const Vec norm = widen_some<KIND>(own + i, width - i) * scale * widen_some<KIND>(weight + i, width - i);
            narrow_some<KIND>(y + r * width + i, norm * open, width - i);
        }
    }
}

// The first token of each row's largest logit, or of a NaN, with which a row is not finite.
template <Kind KIND>
void best(const void* logits_, long stride, int64_t* tokens, bool* finite, long rows, long size, int num_threads) {
    typedef typename Stored<KIND>::Item Item;
    const Item* logits = static_cast<const Item*>(logits_);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > SMALL)
    for (long r = 0; r < rows; r++) {
        const Item* own = logits + r * stride;
        Vec most = Vec{} - std::numeric_limits<float>::infinity();
        Ints wrong = {};
        const long whole = size / LANES * LANES;
        for (long i = 0; i < whole; i += LANES) {
            const Vec each = Stored<KIND>::widen(own + i);
            most = each > most ? each : most;
            wrong |= each != each;
        }
        float top = most[0];
        bool has_nan = false;
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top, has_nan |= wrong[lane] != 0;
        for (long i = whole; i < size; i++) {
            const float each = widen_some<KIND>(own + i, 1)[0];
            top = each > top ? each : top;
            has_nan |= each != each;
        }
        long token = 0;
        for (; token < whole; token += LANES) {
            const Ints equal = Stored<KIND>::widen(own + token) == top;
            int found = 0;
            for (int lane = 0; lane < LANES; lane++) found |= equal[lane];
            if (found) break;
        }
        while (token < size - 1 && !(widen_some<KIND>(own + token, 1)[0] == top)) token++;
        if (has_nan)
            for (token = 0; widen_some<KIND>(own + token, 1)[0] == widen_some<KIND>(own + token, 1)[0];) token++;
        tokens[r] = token;
        finite[r] = !has_nan && std::isfinite(top);
    }
}

}  // namespace

extern "C" {

void norm(const void* x, const void* residual, const void* weight, void* y, void* total, long rows, long width,
          float eps, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? normed<FLOAT32> : kind == BFLOAT16 ? normed<BFLOAT16> : normed<FLOAT16>;
    of_kind(x, residual, weight, y, total, rows, width, eps, num_threads);
}

void gated_norm(const void* x, const void* gate, const void* weight, void* y, long tokens, long heads, long width,
                long gate_stride, float eps, bool is_silu, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32    ? gated_normed<FLOAT32>
                    : kind == BFLOAT16 ? gated_normed<BFLOAT16>
                                       : gated_normed<FLOAT16>;
    of_kind(x, gate, weight, y, tokens, heads, width, gate_stride, eps, is_silu, num_threads);
}

void rotate(const void* x, const void* cos, const void* sin, void* y, long rows, long heads, long dim, long row_stride,
            long head_stride, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? turned<FLOAT32> : kind == BFLOAT16 ? turned<BFLOAT16> : turned<FLOAT16>;
    of_kind(x, cos, sin, y, rows, heads, dim, row_stride, head_stride, num_threads);
}

// y [M, I] = gate(x[:, :I]) * x[:, I:]
void gate(int which, const void* x, void* y, long rows, long width, float slope, float limit, int kind,
          int num_threads) {
    auto* of_kind = kind == FLOAT32 ? gated<FLOAT32> : kind == BFLOAT16 ? gated<BFLOAT16> : gated<FLOAT16>;
    of_kind(static_cast<Gate>(which), x, y, rows, width, slope, limit, num_threads);
}

void curve(int which, const void* x, void* y, long count, int kind, int num_threads) {
    auto* of_kind = kind == FLOAT32 ? curved<FLOAT32> : kind == BFLOAT16 ? curved<BFLOAT16> : curved<FLOAT16>;
    of_kind(static_cast<Curve>(which), x, y, count, num_threads);
}

void score(const void* x, const void* weight, const float* bias, void* y, long rows, long width, long outputs, int kind,
           int num_threads) {
    auto* of_kind = kind == FLOAT32 ? scored<FLOAT32> : kind == BFLOAT16 ? scored<BFLOAT16> : scored<FLOAT16>;
    of_kind(x, weight, bias, y, rows, width, outputs, num_threads);
}

void softmax(const float* x, float* y, long rows, long width) { shared_out(x, y, rows, width); }

void choose(const void* logits, long stride, int64_t* tokens, bool* finite, long rows, long size, int kind,
            int num_threads) {
    auto* of_kind = kind == FLOAT32 ? best<FLOAT32> : kind == BFLOAT16 ? best<BFLOAT16> : best<FLOAT16>;
    of_kind(logits, stride, tokens, finite, rows, size, num_threads);
}
}
