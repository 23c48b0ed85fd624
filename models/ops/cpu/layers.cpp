// The layers of a plain decoder, one after the other, in one call: the operators of the other sources, in the order in
// which models/decoder.py calls them, with the same bits.
//
// The weights of each operator displace from the caches what Python reads between two of them, which then takes ten
// times as long as it would: a third of a decode step, in small models.
//
// Legend: T rows of a step, H query heads, K heads of keys and values, D channels of a head, I inner width.

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "operators.h"

namespace {

struct Operators {
    decltype(&multiply) product;
    decltype(&norm) normed;
    decltype(&rotate) rotated;
    decltype(&gate) gated;
    decltype(&write_tokens) written;
    decltype(&decode) decoded;
    decltype(&extend) extended;
};

struct Weight {
    const void* panels;
    const float* bias;
    long num_outputs, num_inputs;
    int kind;
};

// What the layers of one lifetime and one window read in a step.
struct View {
    const int64_t* places;  // [T] in the cache
    long num_decodes;
    const int64_t* decodes;  // [R]: their rows; null where they are the first ones
    const int64_t *address, *of_row;  // as of `decode`
    const int32_t *low, *high;
    const uint8_t* is_tile;
    const int64_t* first_tile;
    long most_tiles;
    const int64_t *tiles, *spans;  // as of `extend`
    long num_spans, window, first_key;
    const void *cos, *sin;  // [T, D]
};

enum HeadNorm { NONE, BEFORE, AFTER };  // rotary

struct Layer {
    Weight qkv, output, gate_up, down;
    const void *input_norm, *mlp_norm, *query_norm, *key_norm;
    const void *attention_post_norm, *mlp_post_norm;  // null without
    const View* view;
    Pages pages;
    int head_norm, gate;
    float eps;
};

struct Step {
    const Layer* layers;
    long num_layers, rows, num_read;
    const int64_t* read;       // [R]: the rows that are read behind the last layer, some several times; R of -1: all
    const void *x, *residual;  // [T, hidden]; the residual is null before the first layer
    void *last, *total;        // [T and R at least, hidden]: the last layer's output, and what it is added to
    void* room;                // of room_of_step bytes
    int kind, num_threads;
};

inline long bytes_of(int kind) { return kind == 0 ? 4 : 2; }  // enum Kind of vectors.h
inline long whole_lines(long bytes) { return (bytes + 63) / 64 * 64; }

// The parts of a step's room: so many items of each row, and where they begin.
struct Room {
    long widths[11];
    char *normed, *qkv, *query, *key, *attended, *some_query, *some_attended, *gate_up, *inner, *some_x, *some_residual;

    explicit Room(const Layer& of) {
        const long heads = of.pages.heads * of.pages.dim, kv = of.pages.kv_heads * of.pages.dim;
        const long hidden = of.qkv.num_inputs;
        const long of_all[] = {hidden, of.qkv.num_outputs,     heads,                  kv,     heads, heads,
                               heads,  of.gate_up.num_outputs, of.down.num_inputs, hidden, hidden};
        std::memcpy(widths, of_all, sizeof(widths));
    }
    long bytes(long rows, long item) const {
        long sum = 0;
        for (const long width : widths) sum += whole_lines(rows * width * item);
        return sum;
    }
    void begin(long rows, long item, void* room) {
        char* at = static_cast<char*>(room);
        const long* width = widths;
        for (char** part : {&normed, &qkv, &query, &key, &attended, &some_query, &some_attended, &gate_up, &inner,
                            &some_x, &some_residual})
            *part = at, at += whole_lines(rows * *width++ * item);
    }
};

void product(const Operators& by, const Step& of, long rows, const void* x, const Weight& weight, void* y,
             bool& has_memory) {
    has_memory &= by.product(x, weight.num_inputs, weight.panels, weight.bias, y, weight.num_outputs, rows,
                             weight.num_outputs, weight.num_inputs, weight.kind, of.num_threads);
}

// y = norm(x) * weight of rows as wide as x, or of the sum of x and `residual`, which is written to `total`.
void normed(const Operators& by, const Step& of, const Layer& layer, long rows, const void* x, const void* residual,
            const void* weight, void* y, void* total) {
    by.normed(x, residual, weight, y, total, rows, layer.qkv.num_inputs, layer.eps, of.kind, of.num_threads);
}

// Rotate heads [T, N, D], rows `stride` items apart, to `to`, which are whole rows; they are normed before or after.
void turn_heads(const Operators& by, const Step& of, const Layer& layer, const char* from, long stride, long heads,
                const void* weight, char* to, char* room) {
    const long dim = layer.pages.dim, item = bytes_of(of.kind), row = heads * dim * item;
    const View& view = *layer.view;
    if (layer.head_norm == BEFORE) {
        for (long r = 0; r < of.rows; r++) std::memcpy(room + r * row, from + r * stride * item, row);
        by.normed(room, nullptr, weight, room, nullptr, of.rows * heads, dim, layer.eps, of.kind, of.num_threads);
        from = room, stride = heads * dim;
    }
    by.rotated(from, view.cos, view.sin, to, of.rows, heads, dim, stride, dim, of.kind, of.num_threads);
    if (layer.head_norm == AFTER)
        by.normed(to, nullptr, weight, to, nullptr, of.rows * heads, dim, layer.eps, of.kind, of.num_threads);
}

// What the queries in room.query read comes to room.attended.
void attend(const Operators& by, const Step& of, const Layer& layer, const Room& room, bool& has_memory) {
    const View& view = *layer.view;
    const long row = layer.pages.heads * layer.pages.dim * bytes_of(of.kind);
    char *query = room.query, *output = room.attended;
    if (view.decodes) {
        query = room.some_query, output = room.some_attended;
        for (long r = 0; r < view.num_decodes; r++) std::memcpy(query + r * row, room.query + view.decodes[r] * row, row);
    }
    if (view.num_decodes)
        has_memory &= by.decoded(&layer.pages, query, view.address, view.of_row, view.low, view.high, view.is_tile,
                                 view.first_tile, output, nullptr, view.num_decodes, view.most_tiles, of.num_threads);
    if (view.decodes)
        for (long r = 0; r < view.num_decodes; r++)
            std::memcpy(room.attended + view.decodes[r] * row, output + r * row, row);
    if (view.num_spans)
        has_memory &= by.extended(&layer.pages, room.query, view.tiles, view.spans, room.attended, view.num_spans,
                                  view.window, view.first_key, of.num_threads);
}

// What attention makes of x [T, hidden] comes to of.last; returns the residual to which it is added.
const void* mix(const Operators& by, const Step& of, const Layer& layer, const Room& room, const void* x,
                const void* residual, bool& has_memory) {
    const long item = bytes_of(of.kind), width = layer.qkv.num_outputs;
    const long heads = layer.pages.heads * layer.pages.dim, kv = layer.pages.kv_heads * layer.pages.dim;
    normed(by, of, layer, of.rows, x, residual, layer.input_norm, room.normed, residual ? of.total : nullptr);
    product(by, of, of.rows, room.normed, layer.qkv, room.qkv, has_memory);
    const char *keys = room.qkv + heads * item, *values = keys + kv * item;
    turn_heads(by, of, layer, room.qkv, width, layer.pages.heads, layer.query_norm, room.query, room.some_query);
    turn_heads(by, of, layer, keys, width, layer.pages.kv_heads, layer.key_norm, room.key, room.some_query);
    by.written(&layer.pages, room.key, values, layer.view->places, of.rows, kv, width, false, of.num_threads);
    attend(by, of, layer, room, has_memory);
    product(by, of, of.rows, room.attended, layer.output, of.last, has_memory);
    if (layer.attention_post_norm)
        normed(by, of, layer, of.rows, of.last, nullptr, layer.attention_post_norm, of.last, nullptr);
    return residual ? of.total : x;
}

// The MLP of so many rows x, which are added to `residual`: its output comes to of.last, and the sum to of.total.
void transform(const Operators& by, const Step& of, const Layer& layer, const Room& room, long rows, const void* x,
               const void* residual, bool& has_memory) {
    normed(by, of, layer, rows, x, residual, layer.mlp_norm, room.normed, of.total);
    product(by, of, rows, room.normed, layer.gate_up, room.gate_up, has_memory);
    by.gated(layer.gate, room.gate_up, room.inner, rows, layer.down.num_inputs, 0, 0, of.kind, of.num_threads);
    product(by, of, rows, room.inner, layer.down, of.last, has_memory);
    if (layer.mlp_post_norm) normed(by, of, layer, rows, of.last, nullptr, layer.mlp_post_norm, of.last, nullptr);
}

// Rows of [T, width] items behind one another.
const void* gathered(const void* from, const int64_t* rows, long count, long bytes, char* to) {
    for (long r = 0; r < count; r++) std::memcpy(to + r * bytes, static_cast<const char*>(from) + rows[r] * bytes, bytes);
    return to;
}

}  // namespace

extern "C" {

// The bytes that the room of a step of so many rows, T and R at least, takes in layers of the shape of this one.
long room_of_step(const Layer* layer, long rows, int kind) {
    return Room(*layer).bytes(rows, bytes_of(kind));
}

// Returns whether there was memory for all of it.
bool compute_layers(const Operators* by, const Step* step) {
    bool has_memory = true;
    const void *x = step->x, *residual = step->residual;
    for (long i = 0; has_memory && i < step->num_layers; i++) {
        const Layer& layer = step->layers[i];
        const long item = bytes_of(step->kind);
        Room room(layer);
        room.begin(std::max(step->rows, step->num_read), item, step->room);
        residual = mix(*by, *step, layer, room, x, residual, has_memory);
        x = step->last;
        long rows = step->rows;
        if (step->num_read >= 0 && i == step->num_layers - 1) {  // only these are read behind the last layer
            const long bytes = layer.qkv.num_inputs * item;
            rows = step->num_read;
            x = gathered(x, step->read, rows, bytes, room.some_x);
            residual = gathered(residual, step->read, rows, bytes, room.some_residual);
        }
        transform(*by, *step, layer, room, rows, x, residual, has_memory);
        x = step->last, residual = step->total;
    }
    return has_memory;
}
}
