//! Builds and binds `vendor/guard` when llama.cpp is in the build; does nothing otherwise.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The program is taken elsewhere with its libraries beside it.
    if cfg!(feature = "dynamic-backends") && std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN");
    }
    #[cfg(feature = "llama")]
    guard::build();
}

#[cfg(feature = "llama")]
mod guard {
    use std::{env, path::PathBuf};

    const SOURCE: &str = "vendor/guard/guard.cpp";
    const HEADER: &str = "vendor/guard/guard.h";
    /// The types of llama.cpp that the header names; llama-cpp-sys-2 has bound them already.
    const TYPES: &str = "ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_threadpool_t, gguf_context, llama_batch, llama_chat_message, llama_context, \
                         llama_context_params, llama_model, llama_model_params, llama_pos, llama_sampler, \
                         llama_seq_id, llama_token, llama_token_data_array, llama_vocab";

    pub fn build() {
        println!("cargo::rerun-if-changed={SOURCE}");
        println!("cargo::rerun-if-changed={HEADER}");
        // llama-cpp-sys-2 exports its install root; the guard must see the headers that library was built from.
        let root = env::var_os("DEP_LLAMA_ROOT").expect("llama-cpp-sys-2 did not export DEP_LLAMA_ROOT");
        let include = PathBuf::from(root).join("include");
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));

        cc::Build::new().cpp(true).std("c++17").include(&include).file(SOURCE).compile("eldr_guard");

        bindgen::Builder::default()
            .header(HEADER)
            .clang_arg(format!("-I{}", include.display()))
            .allowlist_function("eldr_guard_.*")
            .allowlist_type("eldr_guard_.*")
            .allowlist_var("ELDR_GUARD_(OK|NO_MEMORY|NO_BACKEND)")
            .allowlist_recursively(false)
            .raw_line(format!("use llama_cpp_sys_2::{{{TYPES}}};"))
            .generate_comments(false)
            .layout_tests(false)
            .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
            .generate()
            .expect("bindgen reads vendor/guard/guard.h")
            .write_to_file(out.join("guard.rs"))
            .expect("OUT_DIR is writable");
    }
}
