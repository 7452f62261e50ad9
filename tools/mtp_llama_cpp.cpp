// Results of llama.cpp for the MTP head of a GGUF file: mtp_llama_cpp FILE TOKENS OUTPUT (see tools/make_mtp_gguf_goldens.py).
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama-ext.h"
#include "llama.h"

static llama_batch batch_of(const int * tokens, int count, int first, const float * rows, int width) {
    llama_batch batch = llama_batch_init(count, rows ? width : 0, 1);
    if (rows) {  // a batch of a head has tokens and vectors
        batch.token = (llama_token *) malloc(count * sizeof(llama_token));
        for (size_t i = 0; i < (size_t) count * width; i++) batch.embd[i] = rows[i];
    }
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    return batch;
}

int main(int argc, char ** argv) {
    if (argc != 4) return 1;
    ggml_backend_load_all();
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mtp = true;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) return 2;
    std::vector<int> tokens;
    FILE * file = fopen(argv[2], "r");
    for (int token; fscanf(file, "%d", &token) == 1;) tokens.push_back(token);
    fclose(file);
    const int count = (int) tokens.size(), width = llama_model_n_embd(model);
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    llama_context * decoder = llama_init_from_model(model, params);
    llama_set_embeddings_nextn(decoder, true, false);
    if (llama_decode(decoder, batch_of(tokens.data(), count, 0, nullptr, 0))) return 3;
    const float * found = llama_get_embeddings_nextn(decoder);
    const std::vector<float> rows(found, found + (size_t) count * width);

    params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other = decoder;
    llama_context * head = llama_init_from_model(model, params);
    if (!head) return 4;
    llama_set_embeddings_nextn(head, true, true);
    if (llama_decode(head, batch_of(tokens.data() + 1, count - 1, 1, rows.data(), width))) return 5;
    FILE * output = fopen(argv[3], "wb");
    fwrite(rows.data(), sizeof(float), rows.size(), output);
    for (int i = 0; i < count - 1; i++) fwrite(llama_get_logits_ith(head, i), sizeof(float), vocabulary, output);
    fclose(output);
    return 0;
}
