//! Answers that come back from their decode worker for the chat's next turn.

use std::sync::Arc;

use eldr::{
    schedule::{Job, Reuse},
    types::{Request, RequestId, SamplingParams},
};

use super::{World, joined, tokens};

#[test]
fn the_next_turn_of_a_chat_computes_only_what_is_new() {
    let mut world = World::new(5, 1000, Reuse::Prefix, vec![]);
    let mut chat = tokens(22, 1);
    let mut n_cached = Vec::new();
    for turn in 0..3 {
        let request = Request {
            prompt: chat.clone(),
            max_tokens: 9,
            sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
            domain: None,
            deadline: None,
        };
        world.running.insert(RequestId(turn), chat.clone());
        world.worker.admit(Job::new(RequestId(turn), Arc::new(request)));
        let handoff = world.drain().remove(0);
        n_cached.push(handoff.job.n_cached);
        let left = World::decode(handoff, true).unwrap();
        // The last token drawn was not run.
        chat = joined(&[&left.tokens, &[5, 6, 7]]);
        world.worker.take_in(left);
        world.step();
    }
    assert_eq!(n_cached, [0, 30, 41], "of 22, 33 and 44 tokens");
    assert_eq!(world.stats.n_returned, 3);
}

#[test]
fn an_answer_whose_picks_were_not_counted_is_not_used_where_picks_count() {
    let mut world = World::new(5, 1000, Reuse::Prefix, vec![]);
    world.submit(0, &tokens(22, 1));
    let mut handoff = world.drain().remove(0);
    let request = Arc::get_mut(&mut handoff.job.request).unwrap();
    request.max_tokens = 9;
    let left = World::decode(handoff, false).unwrap();
    assert!(left.counts.is_none());
    let next = joined(&[&left.tokens, &[5, 6]]);
    world.worker.take_in(left);
    assert_eq!(world.cached(&[&next]), [22]);
    assert_eq!(world.stats.n_returned, 0);
}

// Symptom: with answers that come back, chats prefilled more than without, because each had two slots, and those of other
// chats had to make room.
#[test]
fn what_an_answer_holds_too_is_the_first_to_make_room() {
    let mut world = World::new(4, 1000, Reuse::Prefix, vec![]);
    let (old, chat, new) = (tokens(21, 1), tokens(22, 2), [tokens(20, 3), tokens(19, 4)]);
    assert_eq!(world.cached(&[&old]), [0]);
    world.submit(0, &chat);
    let mut handoff = world.drain().remove(0);
    Arc::get_mut(&mut handoff.job.request).unwrap().max_tokens = 9;
    let left = World::decode(handoff, true).unwrap();
    let next = joined(&[&left.tokens, &[5, 6]]);
    world.worker.take_in(left);
    assert_eq!(world.cached(&[&new[0], &new[1]]), [0, 0], "one in the last empty slot, one in the chat's first");
    assert_eq!(world.cached(&[&old]), [19], "the oldest is still there");
    assert_eq!(world.cached(&[&next]), [30], "and so is the answer");
}
