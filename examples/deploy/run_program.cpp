/* Runs a program of torch.export that AOTInductor has packaged, without Python.
 *
 *     TORCH=$(python -c "import torch; print(torch.__path__[0])")
 *     g++ -std=c++20 -I"$TORCH/include" run_program.cpp -o run_program -L"$TORCH/lib" -Wl,-rpath,"$TORCH/lib" \
 *         -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -ldl
 *     ./run_program model.pt2 inputs.pt outputs.pt
 *
 * inputs.pt is a list of tensors, written by torch.save; torch.load reads outputs.pt, a tuple. A fourth
 * argument is a library of operators, such as gemmsmith.torch.export_operators writes.
 */
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int count, char **words) {
    if (count < 4) return std::cerr << "run_program model.pt2 inputs.pt outputs.pt [operators.so]\n", 2;
    if (count > 4 && !dlopen(words[4], RTLD_NOW | RTLD_GLOBAL)) return std::cerr << dlerror() << "\n", 1;
    try {
        c10::InferenceMode without_gradients;
        std::ifstream file(words[2], std::ios::binary);
        const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
        const c10::IValue list = torch::jit::pickle_load(bytes);
        std::vector<at::Tensor> inputs;
        for (const c10::IValue &x : list.toListRef()) inputs.push_back(x.toTensor());
        torch::inductor::AOTIModelPackageLoader program(words[1]);
        const std::vector<at::Tensor> results = program.run(inputs);
        const auto tuple = c10::ivalue::Tuple::create(std::vector<c10::IValue>(results.begin(), results.end()));
        const std::vector<char> outputs = torch::jit::pickle_save(tuple);
        std::ofstream(words[3], std::ios::binary).write(outputs.data(), (std::streamsize)outputs.size());
    } catch (const std::exception &error) {
        return std::cerr << error.what() << "\n", 1;
    }
}
