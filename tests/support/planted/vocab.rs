//! The planted models' tokenizer: byte-level BPE without merges, so that every ASCII character is one token.

use eldr::{
    llama::gguf_file::{Array, GgufWriter, Value},
    types::Token,
};

/// Tokens of the vocabulary: two control tokens, printable ASCII, newline, tab, and pairs that no text yields.
pub const N_VOCAB: usize = 128;

/// The token of an ASCII character that is printable, a newline or a tab.
pub fn token_of(c: char) -> Token {
    match c {
        ' '..='~' => 2 + (c as Token - ' ' as Token),
        '\n' => 97,
        '\t' => 98,
        _ => panic!("{c:?} has no token in a planted vocabulary"),
    }
}

/// Puts the tokenizer's metadata.
pub fn put(writer: &mut GgufWriter) {
    let mut tokens = vec!["<s>".to_owned(), "</s>".to_owned()];
    // GPT-2's byte alphabet writes space, newline and tab as the letters at U+0100 plus their code.
    tokens.extend((' '..='~').map(|c| if c == ' ' { '\u{120}'.to_string() } else { c.to_string() }));
    tokens.extend(["\u{10a}".to_owned(), "\u{109}".to_owned()]);
    let pairs = ('a'..='z').chain('A'..='C').map(|c| format!("{c}{c}"));
    tokens.extend(pairs);
    assert_eq!(tokens.len(), N_VOCAB);
    // Token types of llama.h: 3 is control, 1 is normal.
    let types = (0..N_VOCAB).map(|id| if id < 2 { 3 } else { 1 }).collect();
    let mut set = |key: &str, value: Value| writer.set(&format!("tokenizer.ggml.{key}"), value).expect("writable");
    set("model", "gpt2".into());
    set("pre", "gpt-2".into());
    set("tokens", Value::Array(Array::Str(tokens)));
    set("token_type", Value::Array(Array::I32(types)));
    set("merges", Value::Array(Array::Str(Vec::new())));
    set("bos_token_id", 0.into());
    set("eos_token_id", 1.into());
    set("add_bos_token", false.into());
}
