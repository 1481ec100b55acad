//! What integration tests share. Never a test itself.

#![allow(dead_code, reason = "each test program uses its own part")]

pub mod planted;
