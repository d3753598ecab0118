//! Many keys with one sync.

use std::sync::Arc;

use super::{Reserve, Store};
use crate::engine::{Begun, Engine, RestsOn};
use crate::error::Error;
use crate::key::{Fingerprint, Key};
use crate::options::ReserveOptions;
use crate::reservation::{Asked, Completion, NotStored, Reservation};
use crate::wait::{Caller, now};

/// One question of a batch: see [`Store::reserve_batch`].
#[derive(Clone, Debug)]
#[must_use = "a question does nothing until it is asked"]
pub struct Ask {
    key: Key,
    fingerprint: Fingerprint,
    options: ReserveOptions,
}

impl Ask {
    /// Whether the work named by `key`, for the request with this fingerprint, may be done now.
    pub fn new(key: &Key, fingerprint: Fingerprint) -> Self {
        Self { key: key.clone(), fingerprint, options: ReserveOptions::default() }
    }

    /// Options of this question's own. A batch does not wait for keys in flight: [`ReserveOptions::wait`] is refused.
    pub fn options(self, options: ReserveOptions) -> Self {
        Self { options, ..self }
    }
}

impl Store {
    /// Asks many questions with one sync. The answers come in the order of the questions, as if they had been asked one
    /// after another: of a key that is asked for twice, the second is told that the first has it.
    ///
    /// # Errors
    ///
    /// Each answer has the errors of [`reserve_with`](Self::reserve_with), and `InvalidOptions` where it asks to wait.
    /// `Closed` for the whole when the store is.
    pub fn reserve_batch(&self, asks: &[Ask]) -> Result<Vec<Result<Reserve, Error>>, Error> {
        now(reserve(Arc::clone(self.engine()), self.all_asked(asks), Caller::Thread))
    }

    /// As [`reserve_batch`](Self::reserve_batch), for a task. Dropped before it is ready, it leaves nothing behind.
    ///
    /// # Errors
    ///
    /// As [`reserve_batch`](Self::reserve_batch).
    pub fn reserve_batch_async(
        &self,
        asks: &[Ask],
    ) -> impl Future<Output = Result<Vec<Result<Reserve, Error>>, Error>> + Send + use<> {
        reserve(Arc::clone(self.engine()), self.all_asked(asks), Caller::Task)
    }

    /// Stores many responses with one sync; what came of each is told in their order.
    ///
    /// # Errors
    ///
    /// Each as [`Reservation::complete`], with its guard.
    pub fn complete_batch(
        &self,
        items: impl IntoIterator<Item = (Reservation, Vec<u8>)>,
    ) -> Vec<Result<Completion, NotStored>> {
        now(complete(Arc::clone(self.engine()), all_tried(items), Caller::Thread))
    }

    /// As [`complete_batch`](Self::complete_batch), for a task. Dropped before it is ready, each response is stored or
    /// its key interrupted.
    pub fn complete_batch_async<I>(
        &self,
        items: I,
    ) -> impl Future<Output = Vec<Result<Completion, NotStored>>> + Send + use<I>
    where
        I: IntoIterator<Item = (Reservation, Vec<u8>)>,
    {
        complete(Arc::clone(self.engine()), all_tried(items), Caller::Task)
    }

    fn all_asked(&self, asks: &[Ask]) -> Vec<Result<Asked, Error>> {
        let asked = |ask: &Ask| match self.asked(&ask.key, ask.fingerprint, &ask.options)? {
            (asked, 0) => Ok(asked),
            (_, _) => Err(Error::invalid_option("wait", "is not for a batch, which waits for nobody")),
        };
        asks.iter().map(asked).collect()
    }
}

fn all_tried(items: impl IntoIterator<Item = (Reservation, Vec<u8>)>) -> Vec<(Reservation, Vec<u8>)> {
    items.into_iter().map(|(reservation, response)| (reservation.tried(), response)).collect()
}

async fn reserve(
    engine: Arc<Engine>,
    asks: Vec<Result<Asked, Error>>,
    caller: Caller,
) -> Result<Vec<Result<Reserve, Error>>, Error> {
    engine.refuse_closed()?;
    let mut begun = Vec::with_capacity(asks.len());
    for asked in asks {
        begun.push(match asked {
            Ok(asked) => begin(asked, caller).await,
            Err(error) => Err(error),
        });
    }
    engine.settle_all(begun.iter().flatten().filter_map(|(_, _, rests_on)| *rests_on), caller).await;
    let mut answers = Vec::with_capacity(begun.len());
    for begun in begun {
        answers.push(match begun {
            Ok((asked, answer, rests_on)) => {
                engine.settle(rests_on, caller).await.map(|()| answer.seen(&asked.question()))
            }
            Err(error) => Err(error),
        });
    }
    Ok(answers)
}

async fn begin(asked: Asked, caller: Caller) -> Result<(Asked, Reserve, Option<RestsOn>), Error> {
    let question = asked.question();
    let Begun { acted, rests_on } = question.engine.reserve(question.key, question.terms, 0, caller).await?;
    let answer = Reserve::of(&question, acted);
    Ok((asked, answer, rests_on))
}

async fn complete(
    engine: Arc<Engine>,
    items: Vec<(Reservation, Vec<u8>)>,
    caller: Caller,
) -> Vec<Result<Completion, NotStored>> {
    let mut begun = Vec::with_capacity(items.len());
    for (reservation, response) in items {
        begun.push(reservation.begin_to_finish(&response, true, caller).await);
    }
    engine.settle_all(begun.iter().flatten().filter_map(|finishing| finishing.rests_on(&engine)), caller).await;
    let mut completions = Vec::with_capacity(begun.len());
    for begun in begun {
        completions.push(match begun {
            Ok(finishing) => finishing.settle(caller).await,
            Err(not_stored) => Err(not_stored),
        });
    }
    completions
}
