// Quantise a GGUF file with the llama.cpp (or ik_llama.cpp) library that this program is linked to; list the result.
//
//   quantise_gguf INPUT OUTPUT FTYPE IMPORTANCE [pure]
//
// FTYPE is a value of llama_ftype; 0 dequantises INPUT to float32. With "pure", every matrix has the same type.
// IMPORTANCE is a file of mean squares of inputs, or "-" for none. For each tensor, the file holds the length of its
// name (32 bits), the name, the number of columns (32 bits), and a float32 per column. The program prints
// "name type rows columns bytes" for each output tensor.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ggml.h"
#include "llama.h"
#if __has_include("gguf.h")
#include "gguf.h"
#endif

using Importance = std::unordered_map<std::string, std::vector<float>>;

static Importance read_importance(const char * path) {
    Importance found;
    std::ifstream file(path, std::ios::binary);
    std::uint32_t length = 0, columns = 0;
    while (file.read(reinterpret_cast<char *>(&length), sizeof length)) {
        std::string name(length, ' ');
        file.read(name.data(), length).read(reinterpret_cast<char *>(&columns), sizeof columns);
        std::vector<float> values(columns);
        if (!file.read(reinterpret_cast<char *>(values.data()), columns * sizeof(float))) {
            std::fprintf(stderr, "%s is cut short\n", path);
            std::exit(2);
        }
        found[name] = std::move(values);
    }
    return found;
}

// Newer versions accept an array that ends with a null name; older versions accept a pointer to this map.
template <typename Parameters> static void set_importance(Parameters & parameters, Importance & found) {
    using Pointer = decltype(parameters.imatrix);
    if constexpr (std::is_same_v<Pointer, void *>) {
        parameters.imatrix = &found;
    } else {
        static std::vector<std::remove_const_t<std::remove_pointer_t<Pointer>>> entries;
        for (auto & [name, values] : found) {
            entries.push_back({name.c_str(), values.data(), values.size()});
        }
        entries.push_back({nullptr, nullptr, 0});
        parameters.imatrix = entries.data();
    }
}

int main(int count, char ** words) {
    if (count != 5 && count != 6) {
        std::fprintf(stderr, "usage: quantise_gguf INPUT OUTPUT FTYPE IMPORTANCE [pure]\n");
        return 2;
    }
    auto parameters = llama_model_quantize_default_params();
    parameters.ftype = static_cast<llama_ftype>(std::atoi(words[3]));
    parameters.nthread = 2;
    parameters.allow_requantize = true;
    parameters.pure = count == 6;
    Importance found;
    if (std::string(words[4]) != "-") {
        found = read_importance(words[4]);
        set_importance(parameters, found);
    }
    if (llama_model_quantize(words[1], words[2], &parameters)) {
        return 1;
    }
    ggml_context * tensors = nullptr;
    gguf_init_params reading = {true, &tensors};
    gguf_context * file = gguf_init_from_file(words[2], reading);
    if (!file) {
        return 1;
    }
    for (ggml_tensor * one = ggml_get_first_tensor(tensors); one; one = ggml_get_next_tensor(tensors, one)) {
        std::printf("%s %s %lld %lld %zu\n", one->name, ggml_type_name(one->type), (long long) ggml_nrows(one),
                    (long long) one->ne[0], ggml_nbytes(one));
    }
    return 0;
}
