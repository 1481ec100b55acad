//! llama.cpp behind safe types.

#![allow(unsafe_code, reason = "this floor is the boundary to llama.cpp")]

pub mod gguf_file;
