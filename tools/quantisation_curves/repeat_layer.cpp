// Write a GGUF file that contains N copies of another file's only layer, with the library linked to this program.
//
//   repeat_layer INPUT OUTPUT ARCHITECTURE LAYERS
//
// The file is for timing a whole model in a format that takes a long time to quantise: the time of a step does not
// depend on the values of the weights, and every layer has separate bytes in the file.

#include <cstdint>
#include <cstdlib>
#include <string>

#include "ggml.h"
#if __has_include("gguf.h")
#include "gguf.h"
#endif

int main(int count, char ** words) {
    if (count != 5) {
        return 2;
    }
    ggml_context * source = nullptr;
    gguf_init_params reading = {false, &source};
    gguf_context * file = gguf_init_from_file(words[1], reading);
    if (!file) {
        return 1;
    }
    const int layers = std::atoi(words[4]);
    gguf_context * whole = gguf_init_empty();
    gguf_set_kv(whole, file);
    gguf_set_val_u32(whole, (std::string(words[3]) + ".block_count").c_str(), (std::uint32_t) layers);
    // This loop makes only tensor descriptions: all copies point to the bytes of the same layer.
    ggml_context * copies = ggml_init({(size_t) 1 << 24, nullptr, true});
    const std::string first = "blk.0.";
    for (ggml_tensor * one = ggml_get_first_tensor(source); one; one = ggml_get_next_tensor(source, one)) {
        const std::string name = one->name;
        if (name.empty()) {
            continue; // data in one block
        }
        const bool in_layer = name.compare(0, first.size(), first) == 0;
        for (int layer = 0; layer < (in_layer ? layers : 1); ++layer) {
            ggml_tensor * copy = ggml_dup_tensor(copies, one);
            copy->data = one->data;
            ggml_set_name(copy, in_layer ? ("blk." + std::to_string(layer) + "." + name.substr(first.size())).c_str()
                                         : name.c_str());
            gguf_add_tensor(whole, copy);
        }
    }
    gguf_write_to_file(whole, words[2], false);
    return 0;
}
