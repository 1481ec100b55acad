//! Which recorded request a simulated one replays, told by the tokens it is made of.
//!
//! Never looks at picks.

use crate::types::Token;

/// A request as the simulated workers know it: they see its tokens and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Drawing {
    /// The position of the recorded request.
    pub index: u32,
    /// It begins with a shared prefix.
    pub shares: bool,
    /// Another copy of the recorded request was in the system when it came.
    pub is_copy: bool,
}

/// Turns drawings into tokens and back; different requests have different tokens, so that only shared prefixes match.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coding {
    n_requests: u32,
}

impl Coding {
    /// For a trace of `n_requests`.
    pub fn new(n_requests: usize) -> Self {
        let n_requests = u32::try_from(n_requests).ok().filter(|&n| n < (1 << 24));
        Self { n_requests: n_requests.expect("a trace of fewer than 16 million requests") }
    }

    /// Every own token of the `serial`-th request that comes.
    pub fn token(self, serial: u64, drawing: Drawing) -> Token {
        let kinds = self.n_requests * 4;
        let round = (serial % u64::from(i32::MAX as u32 / kinds)) as u32;
        let code = round * kinds + drawing.index * 4 + u32::from(drawing.shares) * 2 + u32::from(drawing.is_copy);
        code.cast_signed()
    }

    /// The request that a token is of; nothing for a token of a shared prefix.
    pub fn drawing(self, token: Token) -> Option<Drawing> {
        let code = u32::try_from(token).ok()? % (self.n_requests * 4);
        Some(Drawing { index: code / 4, shares: code & 2 != 0, is_copy: code & 1 != 0 })
    }

    /// Every token of the shared prefix `group`.
    pub fn prefix_token(group: u32) -> Token {
        -1 - group.cast_signed()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_token_tells_its_request(serial: u64, n in 1usize..2000, at: prop::sample::Index, shares: bool, is_copy: bool) {
            let coding = Coding::new(n);
            let drawing = Drawing { index: at.index(n) as u32, shares, is_copy };
            let token = coding.token(serial, drawing);
            prop_assert!(token >= 0);
            prop_assert_eq!(coding.drawing(token), Some(drawing));
            prop_assert_ne!(token, coding.token(serial.wrapping_add(1), drawing));
            prop_assert_eq!(coding.drawing(Coding::prefix_token(7)), None);
        }
    }
}
