//! Whether a history of concurrent calls can be put in order.
//!
//! A history is linearizable when every call can be given one moment between its invocation and its answer, so that the
//! calls, taken in the order of these moments, are answered as the sequential contract of [`spec`] says. Keys do not
//! know of each other, so a history is linearizable when it is for each key alone (P-compositionality, Herlihy and Wing
//! 1990, section 3); only the tokens are the store's, and [`check`] looks at their order across all keys.
//!
//! The search is Wing and Gong's with Lowe's memory ("Testing for linearizability", 2017), run forwards: it walks
//! through the invocations and answers in the order of time and keeps the set of all *configurations* that explain what
//! was seen so far. A configuration is a state of the key, and how far each open call has come. Calls are put in order
//! as late as they can be, when one of them is answered: then every configuration is left out in which that call cannot
//! have taken effect by now. An empty set is the proof that the history is false. A set holds each configuration once,
//! so a history costs about its length times the configurations that its few open calls allow, however long it is.
//!
//! A call without an answer, because its process was killed, may have taken effect at any moment up to the end of that
//! process, or never.

pub(crate) mod spec;
#[cfg(test)]
mod tests;
mod words;

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;

use self::spec::{Answer, Call, State};

/// Calls that may be open at once on one key.
const OPEN_MAX: usize = 16;

/// More configurations than this at one moment mean that the history says too little.
const CONFIGURATIONS_MAX: usize = 1 << 20;

/// How many of the calls before it are printed with the answer that cannot be explained.
const CALLS_TOLD: usize = 24;

/// When nobody is told.
pub(crate) const NEVER: u64 = u64::MAX;

/// A call that has taken its effect: see [`spec::steps`].
const DONE: u8 = u8::MAX;

/// One call, by somebody, at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    /// Of this call alone.
    pub(crate) id: u64,
    /// `None` for what happens to every key at once.
    pub(crate) key: Option<u64>,
    pub(crate) call: Call,
    pub(crate) invoked: u64,
    /// When it was answered, and how; `None` when its process ended before that. [`NEVER`] when the answer came after
    /// the image of the disk was taken with which the history goes on: nobody heard it, but it says what the call did,
    /// if it did anything before.
    pub(crate) answered: Option<(u64, Answer)>,
}

impl Op {
    pub(crate) fn answer(&self) -> Option<Answer> {
        self.answered.map(|(_, answer)| answer)
    }

    pub(crate) fn answered_at(&self) -> u64 {
        self.answered.map_or(NEVER, |(at, _)| at)
    }

    /// Whether somebody heard the answer.
    pub(crate) fn is_told(&self) -> bool {
        self.answered_at() != NEVER
    }

    /// Whether, answered so, it cannot have changed anything.
    fn only_reads(&self) -> bool {
        match (self.call, self.answer()) {
            (Call::Peek, Some(_)) | (Call::Forget, Some(Answer::Unknown)) => true,
            (Call::Reserve(ask), Some(answer)) => !ask.waits && answer != Answer::Unheard && answer.fresh().is_none(),
            _ => false,
        }
    }

    /// Whether this one was over when the other began.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        self.answered_at() < other.invoked
    }
}

/// What it took to find an order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checked {
    pub(crate) calls: usize,
    /// Calls that were never answered.
    pub(crate) open_ends: usize,
    /// The most configurations at one moment.
    pub(crate) configurations: usize,
}

/// Looks for an order of a history of any number of keys.
///
/// # Errors
///
/// Says which answer no order explains.
pub(crate) fn check(history: &[Op]) -> Result<Checked, String> {
    tokens_grow(history)?;
    let mut checked = Checked {
        calls: history.iter().filter(|op| op.key.is_some()).count(),
        open_ends: history.iter().filter(|op| !op.is_told()).count(),
        configurations: 0,
    };
    let keys: BTreeSet<_> = history.iter().filter_map(|op| op.key).collect();
    for key in keys {
        let ops: Vec<_> = history.iter().filter(|op| op.key.is_none_or(|other| other == key)).collect();
        let widest = Search::new(&ops).run().map_err(|why| format!("key {key}: {why}"))?;
        checked.configurations = checked.configurations.max(widest);
    }
    Ok(checked)
}

/// No two reservations have one token, and of two that did not overlap the later one has the larger (P6).
fn tokens_grow(history: &[Op]) -> Result<(), String> {
    let told = history.iter().filter(|op| op.is_told());
    let mut fresh: Vec<_> = told.filter_map(|op| Some((op.invoked, op.answer()?.fresh()?, op))).collect();
    let mut tokens = HashSet::new();
    if let Some((_, token, op)) = fresh.iter().find(|(_, token, _)| !tokens.insert(*token)) {
        return Err(format!("the token {token} was given twice: {op:?}"));
    }
    let mut told: Vec<_> = fresh.iter().map(|(_, token, op)| (op.answered_at(), *token)).collect();
    fresh.sort_unstable_by_key(|(invoked, ..)| *invoked);
    told.sort_unstable();
    let mut told = told.into_iter().peekable();
    let mut token_max = 0;
    for (invoked, token, op) in fresh {
        while let Some((_, earlier)) = told.next_if(|(answered, _)| *answered < invoked) {
            token_max = token_max.max(earlier);
        }
        if token <= token_max {
            return Err(format!("the token {token} was given after {token_max} was told: {op:?}"));
        }
    }
    Ok(())
}

/// A way in which all that was seen so far may have come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Configuration {
    state: State,
    /// By place: how far an open call has come; [`DONE`] when it has taken effect and is not answered yet.
    progress: [u8; OPEN_MAX],
}

struct Search<'a> {
    ops: &'a [&'a Op],
    /// The calls that are open now; a call keeps its place.
    open: [Option<&'a Op>; OPEN_MAX],
    configurations: HashSet<Configuration>,
    widest: usize,
}

enum Event {
    Invoked,
    Answered,
}

impl<'a> Search<'a> {
    fn new(ops: &'a [&'a Op]) -> Self {
        let first = Configuration {
            state: State::first(ops.iter().any(|op| op.call == Call::End(spec::End::PowerLoss))),
            progress: [0; OPEN_MAX],
        };
        Self { ops, open: [None; OPEN_MAX], configurations: HashSet::from([first]), widest: 1 }
    }

    fn run(mut self) -> Result<usize, String> {
        let mut events = Vec::new();
        for op in self.ops {
            events.push((op.invoked, Event::Invoked, *op));
            if op.is_told() {
                events.push((op.answered_at(), Event::Answered, *op));
            }
        }
        events.sort_by_key(|(at, ..)| *at);
        for (at, event, op) in events {
            match (event, op.call) {
                (Event::Invoked, Call::End(end)) => self.end(end),
                (Event::Answered, Call::End(_)) => {}
                (Event::Invoked, _) => {
                    let place = self.open.iter_mut().find(|place| place.is_none());
                    *place.ok_or("more calls are open at once than the search has places for")? = Some(op);
                }
                (Event::Answered, _) => {
                    let before = std::mem::take(&mut self.configurations);
                    self.answer(&before, op);
                    if self.configurations.is_empty() {
                        return Err(self.explain(at, op, &before));
                    }
                }
            }
            self.widest = self.widest.max(self.configurations.len());
            if self.widest > CONFIGURATIONS_MAX {
                return Err(format!("{} configurations at {at}", self.widest));
            }
        }
        Ok(self.widest)
    }

    /// Leaves the configurations in which `op` has taken effect.
    fn answer(&mut self, before: &HashSet<Configuration>, op: &Op) {
        let place = self.open.iter().position(|open| open.is_some_and(|open| open.id == op.id));
        let place = place.expect("a call is answered after it was invoked");
        let mut known = before.clone();
        let mut to_do: Vec<_> = before.iter().copied().collect();
        while let Some(mut configuration) = to_do.pop() {
            if configuration.progress[place] == DONE {
                configuration.progress[place] = 0;
                self.configurations.insert(configuration);
                continue;
            }
            to_do.extend(self.followers(&configuration).into_iter().filter(|follower| known.insert(*follower)));
        }
        self.open[place] = None;
    }

    /// The process has ended: what was open may have taken effect, in any order, or not.
    fn end(&mut self, end: spec::End) {
        let mut known = self.configurations.clone();
        let mut to_do: Vec<_> = known.iter().copied().collect();
        while let Some(configuration) = to_do.pop() {
            to_do.extend(self.followers(&configuration).into_iter().filter(|follower| known.insert(*follower)));
        }
        let ended = known.into_iter().flat_map(|configuration| configuration.state.ended(end));
        self.configurations = ended.map(|state| Configuration { state, progress: [0; OPEN_MAX] }).collect();
        self.open = [None; OPEN_MAX];
    }

    /// What one more step of one open call makes of a configuration. A call that only reads, and is answered here as it
    /// was, comes first and alone: whatever order explains the history with it later does so with it now.
    fn followers(&self, from: &Configuration) -> Vec<Configuration> {
        let mut followers = Vec::new();
        for (place, (open, progress)) in self.open.iter().zip(from.progress).enumerate() {
            let Some(op) = open.filter(|_| progress != DONE) else { continue };
            for (progress, state) in spec::steps(&from.state, op, progress) {
                let mut next = Configuration { state, ..*from };
                next.progress[place] = progress.unwrap_or(DONE);
                if state == from.state && op.only_reads() {
                    return vec![next];
                }
                followers.push(next);
            }
        }
        followers
    }

    fn explain(&self, at: u64, op: &Op, before: &HashSet<Configuration>) -> String {
        let mut why = format!("nothing explains the answer at {at} to {op:?}\n  the key may have been:\n");
        let states: HashSet<_> = before.iter().map(|configuration| configuration.state).collect();
        for state in states.iter().take(CALLS_TOLD) {
            writeln!(why, "    {state:?}").expect("a string has room");
        }
        why.push_str("  what was called before, and what is still open:\n");
        let mut earlier: Vec<_> = self.ops.iter().filter(|other| other.invoked < at).collect();
        earlier.sort_unstable_by_key(|other| other.answered_at().min(at));
        for other in earlier.iter().rev().take(CALLS_TOLD).rev() {
            writeln!(why, "    {other:?}").expect("a string has room");
        }
        why
    }
}
