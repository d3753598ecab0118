//! How a history is written down: when each call began, when it was answered, and how; in memory, or a line at a time.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::linear::Op;
use crate::linear::spec::{Answer, Ask, Bytes, Call, Cause, End, Name, Policy, Shown};
use crate::workload::mixed;

/// The order of all invocations and answers of a history, and of nothing else.
#[derive(Debug)]
pub(crate) struct Stamps(AtomicU64);

impl Stamps {
    pub(crate) fn after(stamp: u64) -> Self {
        Self(AtomicU64::new(stamp + 1))
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// What one thread did.
#[derive(Debug)]
pub(crate) struct Log<'a> {
    pub(crate) stamps: &'a Stamps,
    pub(crate) ops: Vec<Op>,
    /// Every line is said before the thread goes on, so that somebody else knows it when this process is killed.
    pub(crate) aloud: bool,
}

impl<'a> Log<'a> {
    pub(crate) fn new(stamps: &'a Stamps, aloud: bool) -> Self {
        Self { stamps, ops: Vec::new(), aloud }
    }

    /// A call begins; it is told its number, which nothing else in the history has. To be said before the call.
    pub(crate) fn invoke(&mut self, key: Option<u64>, call: impl FnOnce(u64) -> Call) -> u64 {
        let id = self.stamps.next();
        let op = Op { id, key, call: call(id), invoked: id, answered: None };
        if self.aloud {
            say(&format!("invoked {id} {} {}", key.unwrap_or(u64::MAX), spoken(&words_of_call(&op.call))));
        }
        self.ops.push(op);
        id
    }

    /// The latest call was answered.
    pub(crate) fn answer(&mut self, answer: Answer) {
        self.answer_to(self.ops.last().unwrap().id, answer);
    }

    /// This call was answered.
    pub(crate) fn answer_to(&mut self, id: u64, answer: Answer) {
        let at = self.stamps.next();
        let op = self.ops.iter_mut().rfind(|op| op.id == id).unwrap();
        assert!(op.answered.is_none(), "a call is answered once: {op:?}");
        op.answered = Some((at, answer));
        if self.aloud {
            say(&format!("answered {} {at} {}", op.id, spoken(&words_of_answer(&answer))));
        }
    }
}

/// One line, one write, shorter than a pipe's unit: it is told whole or not at all.
pub(crate) fn say(line: &str) {
    std::io::stderr().write_all(format!("history {line}\n").as_bytes()).unwrap();
}

/// Collects the lines that a process said.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    calls: HashMap<u64, Op>,
}

impl Heard {
    /// Understands one line; `false` for a line that does not belong to a history.
    pub(crate) fn hear(&mut self, line: &str) -> bool {
        let Some(line) = line.strip_prefix("history ") else { return false };
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let mut numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        let rest = numbers.split_off(2);
        match (what, numbers.as_slice()) {
            ("invoked", &[id, key]) => {
                let key = Some(key).filter(|key| *key != u64::MAX);
                let op = Op { id, key, call: call_of_words(&rest), invoked: id, answered: None };
                assert_eq!(self.calls.insert(id, op), None, "a call is made once");
            }
            ("answered", &[id, at]) => {
                let op = self.calls.get_mut(&id).unwrap();
                op.answered = Some((at, answer_of_words(&rest)));
            }
            _ => panic!("not understood: {line}"),
        }
        true
    }

    pub(crate) fn into_ops(self) -> Vec<Op> {
        let mut ops: Vec<_> = self.calls.into_values().collect();
        ops.sort_unstable_by_key(|op| op.invoked);
        ops
    }
}

fn spoken(words: &[u64]) -> String {
    words.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

fn words_of_call(call: &Call) -> Vec<u64> {
    let ask_words = |ask: &Ask| [ask.request, ask.lease_ms, ask.policy as u64, u64::from(ask.waits)];
    match call {
        Call::Reserve(ask) => [&[0][..], &ask_words(ask)].concat(),
        Call::Complete { token, body } => vec![1, *token, *body],
        Call::Release { token } => vec![2, *token],
        Call::Drop { token, release } => vec![3, *token, u64::from(*release)],
        Call::Renew { token, guard, lease_ms } => vec![4, *token, *guard, *lease_ms],
        Call::SaveCheckpoint { token, guard, bytes, lease_ms } => vec![5, *token, *guard, *bytes, *lease_ms],
        Call::Detach { token, lease_ms } => vec![6, *token, *lease_ms],
        Call::Reattach { token, lease_ms } => vec![7, *token, *lease_ms],
        Call::TakeOver { token, ask } => [&[8, *token][..], &ask_words(ask)].concat(),
        Call::Resolve { token, body } => vec![9, *token, *body],
        Call::ReleaseInterrupted { token } => vec![10, *token],
        Call::Peek => vec![11],
        Call::Forget => vec![12],
        Call::Advance { ms } => vec![13, *ms],
        Call::End(end) => vec![14, *end as u64],
    }
}

fn call_of_words(words: &[u64]) -> Call {
    let ask_of = |words: [u64; 4]| Ask {
        request: words[0],
        lease_ms: words[1],
        policy: POLICIES.into_iter().find(|policy| *policy as u64 == words[2]).unwrap(),
        waits: words[3] == 1,
    };
    match *words {
        [0, a, b, c, d] => Call::Reserve(ask_of([a, b, c, d])),
        [1, token, body] => Call::Complete { token, body },
        [2, token] => Call::Release { token },
        [3, token, release] => Call::Drop { token, release: release == 1 },
        [4, token, guard, lease_ms] => Call::Renew { token, guard, lease_ms },
        [5, token, guard, bytes, lease_ms] => Call::SaveCheckpoint { token, guard, bytes, lease_ms },
        [6, token, lease_ms] => Call::Detach { token, lease_ms },
        [7, token, lease_ms] => Call::Reattach { token, lease_ms },
        [8, token, a, b, c, d] => Call::TakeOver { token, ask: ask_of([a, b, c, d]) },
        [9, token, body] => Call::Resolve { token, body },
        [10, token] => Call::ReleaseInterrupted { token },
        [11] => Call::Peek,
        [12] => Call::Forget,
        [13, ms] => Call::Advance { ms },
        [14, end] => Call::End(*[End::Kill, End::PowerLoss, End::Close].iter().find(|e| **e as u64 == end).unwrap()),
        _ => panic!("no call: {words:?}"),
    }
}

const POLICIES: [Policy; 3] = [Policy::Surface, Policy::TakeOver, Policy::TakeOverLapsed];
const CAUSES: [Cause; 3] = [Cause::Crash, Cause::Dropped, Cause::LeaseLapsed];
const NAMES: [Name; 3] = [Name::InFlight, Name::Interrupted, Name::Done];

fn words_of_answer(answer: &Answer) -> Vec<u64> {
    match *answer {
        Answer::Fresh(shown) => vec![0, shown.token, shown.attempt, shown.checkpoint],
        Answer::Replay { body, attempt } => vec![1, body, attempt],
        Answer::InFlight(shown) => vec![2, shown.token, shown.attempt, shown.checkpoint],
        Answer::Interrupted(shown, cause) => vec![3, shown.token, shown.attempt, shown.checkpoint, cause as u64],
        Answer::Mismatch(name) => vec![4, name as u64],
        Answer::Done => vec![5],
        Answer::Superseded => vec![6],
        Answer::Held => vec![7],
        Answer::Known { request, name, shown, cause } => {
            let cause = cause.map_or(u64::MAX, |cause| cause as u64);
            vec![8, request, name as u64, shown.token, shown.attempt, shown.checkpoint, cause]
        }
        Answer::Unknown => vec![9],
        Answer::Over => vec![10],
        Answer::Unheard => vec![11],
    }
}

fn answer_of_words(words: &[u64]) -> Answer {
    let shown = |token, attempt, checkpoint| Shown { token, attempt, checkpoint };
    let cause = |word: u64| CAUSES.into_iter().find(|cause| *cause as u64 == word);
    let name = |word: u64| NAMES.into_iter().find(|name| *name as u64 == word).unwrap();
    match *words {
        [0, token, attempt, checkpoint] => Answer::Fresh(shown(token, attempt, checkpoint)),
        [1, body, attempt] => Answer::Replay { body, attempt },
        [2, token, attempt, checkpoint] => Answer::InFlight(shown(token, attempt, checkpoint)),
        [3, token, attempt, checkpoint, why] => {
            Answer::Interrupted(shown(token, attempt, checkpoint), cause(why).unwrap())
        }
        [4, state] => Answer::Mismatch(name(state)),
        [5] => Answer::Done,
        [6] => Answer::Superseded,
        [7] => Answer::Held,
        [8, request, state, token, attempt, checkpoint, why] => {
            let shown = shown(token, attempt, checkpoint);
            Answer::Known { request, name: name(state), shown, cause: cause(why) }
        }
        [9] => Answer::Unknown,
        [10] => Answer::Over,
        [11] => Answer::Unheard,
        _ => panic!("no answer: {words:?}"),
    }
}

/// Bytes that nothing else in the history has, of some length up to a few hundred.
pub(crate) fn bytes_of(number: Bytes) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    let len = usize::try_from(8 + mixed(&[number]) % 400).unwrap();
    let mut word = 0;
    while bytes.len() < len {
        word += 1;
        bytes.extend(mixed(&[number, word]).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The number for which bytes stand; one that nobody uses for bytes that nobody made.
pub(crate) fn number_of(bytes: &[u8]) -> Bytes {
    match bytes.first_chunk() {
        None if bytes.is_empty() => 0,
        Some(number) if bytes_of(u64::from_le_bytes(*number)) == bytes => u64::from_le_bytes(*number),
        _ => u64::MAX,
    }
}
