//! Lengths and contents of ggml's RPC messages, protocol 7 (ggml-rpc.cpp of the pinned llama.cpp).
//!
//! Never reads or writes a socket.
//!
//! A command is a byte, a length (u64) and so many bytes; an answer is a length and so many bytes. Integers are
//! little-endian, as on every machine both ends run on.

/// Bytes of a command before its contents.
pub(super) const HEADER: usize = 9;
/// The protocol's major version; another one is refused by ggml too.
pub(super) const MAJOR: u8 = 7;

const ALLOC_BUFFER: u8 = 0;
const GET_ALIGNMENT: u8 = 1;
const GET_MAX_SIZE: u8 = 2;
const BUFFER_GET_BASE: u8 = 3;
const SET_TENSOR_HASH: u8 = 7;
const GET_TENSOR: u8 = 8;
const COPY_TENSOR: u8 = 9;
const GET_DEVICE_MEMORY: u8 = 11;
const GET_ALLOC_SIZE: u8 = 13;
pub(super) const HELLO: u8 = 14;
pub(super) const DEVICE_COUNT: u8 = 15;
const COUNT: u8 = 18;

/// Contents of a HELLO and of its answer: what the transport can do, after a version in the answer.
pub(super) const HELLO_REQUEST: usize = 24;
pub(super) const HELLO_ANSWER: usize = 28;
pub(super) const DEVICE_COUNT_ANSWER: usize = 4;

/// Whether the protocol has this command.
pub(super) fn is_known(command: u8) -> bool {
    command < COUNT
}

/// Whether a command wants an answer. Such commands are short.
pub(super) fn wants_answer(command: u8) -> bool {
    command == GET_TENSOR || answer_len(command, &[]).is_some()
}

/// The length an answer must have; none if there is no answer, or if the contents of the command do not tell.
pub(super) fn answer_len(command: u8, contents: &[u8]) -> Option<u64> {
    match command {
        ALLOC_BUFFER | GET_DEVICE_MEMORY => Some(16),
        GET_ALIGNMENT | GET_MAX_SIZE | BUFFER_GET_BASE | GET_ALLOC_SIZE => Some(8),
        SET_TENSOR_HASH | COPY_TENSOR => Some(1),
        HELLO => Some(HELLO_ANSWER as u64),
        DEVICE_COUNT => Some(DEVICE_COUNT_ANSWER as u64),
        // A tensor, an offset and the length asked for.
        GET_TENSOR => contents.last_chunk().map(|&len| u64::from_le_bytes(len)),
        _ => None,
    }
}

/// What is said in place of a server that has failed; zeros after it, up to the answer's length.
pub(super) fn made_up(command: u8) -> Vec<u8> {
    match command {
        // Anything that is an alignment and keeps a base aligned.
        GET_ALIGNMENT => 128u64.to_le_bytes().to_vec(),
        BUFFER_GET_BASE => 0x1_0000u64.to_le_bytes().to_vec(),
        GET_MAX_SIZE => u64::MAX.to_le_bytes().to_vec(),
        // The server has the tensor, and copied it: nothing more is sent.
        SET_TENSOR_HASH | COPY_TENSOR => vec![1],
        HELLO => vec![MAJOR],
        // No memory, no devices, no buffer.
        _ => Vec::new(),
    }
}

/// A command as it is sent.
pub(super) fn command(command: u8, contents: &[u8]) -> Vec<u8> {
    let mut bytes = vec![command];
    bytes.extend((contents.len() as u64).to_le_bytes());
    bytes.extend(contents);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_wants_an_answer_has_a_length_for_it() {
        let contents = [&[0; 300][..], &77u64.to_le_bytes()].concat();
        let answers: Vec<u8> = (0..COUNT).filter(|&c| wants_answer(c)).collect();
        assert_eq!(answers, [0, 1, 2, 3, 7, 8, 9, 11, 13, 14, 15]);
        for command in answers {
            let len = answer_len(command, &contents).expect("a length");
            assert!(made_up(command).len() as u64 <= len, "{command}");
        }
        assert_eq!(answer_len(GET_TENSOR, &contents), Some(77));
        assert_eq!(answer_len(GET_TENSOR, &[1, 2]), None);
        assert!(!is_known(COUNT));
    }
}
