//! The layer: what a service says about its keys, once, when its routes are made.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderName};
use http::{HeaderMap, Method, StatusCode, Uri, request, response};
use tower_layer::Layer;

use super::answer::without;
use super::policy::{Found, StoredHeaders, Verdict};
use super::problem::Dialect;
use super::run::Runs;
use super::service::Idempotency;
use super::{Answer, Recipe, media_type};
use crate::key::Key;
use crate::options::{Durability, OnDrop, OnInterrupted, ReserveOptions};
use crate::reservation::KeyInfo;
use crate::store::Store;

const BODY_BYTES_MAX: usize = 1 << 20;
const RESPONSE_BYTES_MAX: usize = 256 << 10;
const LEASE: Duration = Duration::from_secs(30);
const RUN_AT_MOST: Duration = Duration::from_secs(60 * 60);

/// Says whose key it is.
type ScopeOf = dyn Fn(&request::Parts) -> Option<Vec<u8>> + Send + Sync;

/// Changes an answer before it is stored.
type Clean = dyn Fn(&mut Answer) + Send + Sync;

/// Says whether a request may be shown what is stored.
type MayReplay = dyn Fn(&request::Parts, &Key) -> Result<(), StatusCode> + Send + Sync;

/// Says which address a request was sent to.
type UriOf = dyn Fn(&request::Parts) -> Option<Uri> + Send + Sync;

/// Says when a request was first made.
type IssuedAt = dyn Fn(&request::Parts, &[u8]) -> Option<SystemTime> + Send + Sync;

/// What a reconciler gives.
pub(super) type Finding = Pin<Box<dyn Future<Output = Found> + Send>>;

/// Finds out what became of an interrupted key.
pub(super) type Reconcile = dyn Fn(Key, KeyInfo) -> Finding + Send + Sync;

/// What happens to a request whose key is interrupted.
#[derive(Clone)]
pub(super) enum WhenInterrupted {
    Refuse,
    TakeOver,
    Reconcile(Arc<Reconcile>),
}

/// A layer that has not been told how keys are kept apart: it is none yet.
#[derive(Clone, Copy, Debug)]
pub struct Unscoped(());

/// A layer that has been told how keys are kept apart.
#[derive(Clone)]
pub struct Scoped(pub(super) Arc<ScopeOf>);

impl fmt::Debug for Scoped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scoped").finish_non_exhaustive()
    }
}

/// Gives the routes of any tower service the `Idempotency-Key` header: a retry is answered with the first answer, and
/// the work is done once.
///
/// It becomes a layer by [`scope`](Self::scope), which keeps the keys of different callers apart, or by
/// [`shared_scope`](Self::shared_scope), which says aloud that nothing does; without either it does not compile:
///
/// ```compile_fail
/// # fn check(store: keyonce::Store) {
/// let routes: axum::Router = axum::Router::new().layer(keyonce::http::IdempotencyLayer::new(store));
/// # }
/// ```
///
/// Everything else has a default:
///
/// | option | default |
/// |---|---|
/// | [`header`](Self::header) | `Idempotency-Key` |
/// | [`quoted_keys_only`](Self::quoted_keys_only) | off: quoted and bare keys |
/// | [`methods`](Self::methods) | POST, PATCH |
/// | [`required`](Self::required), [`required_when`](Self::required_when) | always |
/// | [`uri`](Self::uri) | that of the request, as the layer sees it |
/// | [`recipe`](Self::recipe), [`accept_also`](Self::accept_also) | method, path, query, content type, body; none |
/// | [`request_bytes_max`](Self::request_bytes_max) | 1 MiB |
/// | [`response_bytes_max`](Self::response_bytes_max) | 256 KiB; a larger answer is passed on and its body not kept |
/// | [`streams`](Self::streams) | `text/event-stream`, `multipart/x-mixed-replace` |
/// | [`wait`](Self::wait) | 0: 409 at once |
/// | [`lease`](Self::lease) | 30 s, renewed while the request runs |
/// | [`run_at_most`](Self::run_at_most) | 1 h: how long it is renewed, and a body passed on to nobody |
/// | [`retention`](Self::retention), [`durability`](Self::durability) | the store's |
/// | [`verdict`](Self::verdict) | [`Verdict::by_head`] |
/// | [`take_over`](Self::take_over), [`reconcile`](Self::reconcile) | neither: an interrupted key is 409 |
/// | [`stored_headers`](Self::stored_headers) | [`StoredHeaders::new`]: all but cookies, credentials, the date |
/// | [`clean`](Self::clean) | stored as it is |
/// | [`may_replay`](Self::may_replay) | every request that the services around the layer let through |
/// | [`issued_at`](Self::issued_at) | not known: no key is too old |
/// | [`expires_header`](Self::expires_header) | off |
///
/// The store's own `lease`, `on_interrupted` and `on_drop` do not count here: a run that ends without an answer, by a
/// panic as well, always leaves its key interrupted. A value that the store refuses, such as a retention longer than
/// its window, makes it answer 503.
#[derive(Clone)]
#[must_use = "a layer does nothing until a service is put into it"]
pub struct IdempotencyLayer<S = Unscoped> {
    config: Config,
    scope: S,
}

/// What was said of a layer, but for the scope.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) store: Store,
    pub(super) header: HeaderName,
    pub(super) bare_keys: bool,
    pub(super) methods: Arc<[Method]>,
    pub(super) required: Arc<dyn Fn(&request::Parts) -> bool + Send + Sync>,
    pub(super) uri: Option<Arc<UriOf>>,
    pub(super) recipe: Recipe,
    pub(super) accept_also: Vec<Recipe>,
    pub(super) request_bytes_max: usize,
    pub(super) response_bytes_max: usize,
    pub(super) streams: Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>,
    pub(super) with: ReserveOptions,
    pub(super) wait: Duration,
    pub(super) lease: Duration,
    pub(super) run_at_most: Duration,
    pub(super) verdict: Arc<dyn Fn(&response::Parts) -> Verdict + Send + Sync>,
    pub(super) when_interrupted: WhenInterrupted,
    pub(super) stored_headers: StoredHeaders,
    pub(super) clean: Option<Arc<Clean>>,
    pub(super) may_replay: Option<Arc<MayReplay>>,
    pub(super) issued_at: Option<Arc<IssuedAt>>,
    pub(super) expires_header: Option<HeaderName>,
    pub(super) marker: HeaderName,
    pub(super) dialect: Dialect,
    pub(super) runs: Runs,
}

impl IdempotencyLayer {
    /// Every option at its default, and not yet a layer: see [`scope`](Self::scope).
    pub fn new(store: Store) -> Self {
        let with = ReserveOptions::new().lease(LEASE).renew_while_held(RUN_AT_MOST);
        let config = Config {
            store,
            header: HeaderName::from_static("idempotency-key"),
            bare_keys: true,
            methods: Arc::new([Method::POST, Method::PATCH]),
            required: Arc::new(|_| true),
            uri: None,
            recipe: Recipe::new(),
            accept_also: Vec::new(),
            request_bytes_max: BODY_BYTES_MAX,
            response_bytes_max: RESPONSE_BYTES_MAX,
            streams: Arc::new(is_endless),
            with: with.on_interrupted(OnInterrupted::Surface).on_drop(OnDrop::Interrupt),
            wait: Duration::ZERO,
            lease: LEASE,
            run_at_most: RUN_AT_MOST,
            verdict: Arc::new(Verdict::by_head),
            when_interrupted: WhenInterrupted::Refuse,
            stored_headers: StoredHeaders::new(),
            clean: None,
            may_replay: None,
            issued_at: None,
            expires_header: None,
            marker: HeaderName::from_static("idempotency-replayed"),
            dialect: Dialect::Ietf,
            runs: Runs::new(),
        };
        Self { config, scope: Unscoped(()) }
    }

    /// Whose key it is: the same key in two scopes is two keys. Make it of what the services around the layer found out
    /// about the caller, such as the account in the request's extensions; never of what a caller may freely say. At
    /// most 255 bytes. `None` refuses the request with 403.
    pub fn scope<T: AsRef<[u8]>>(
        self,
        scope: impl Fn(&request::Parts) -> Option<T> + Send + Sync + 'static,
    ) -> IdempotencyLayer<Scoped> {
        let scope = Scoped(Arc::new(move |parts| scope(parts).map(|scope| scope.as_ref().to_vec())));
        IdempotencyLayer { config: self.config, scope }
    }

    /// One scope for all callers: anybody who knows or guesses a key and sends the same request is shown its answer.
    /// For services with one caller, or whose keys nobody can guess.
    ///
    /// # Panics
    ///
    /// If it is longer than [`Key::SCOPE_BYTES_MAX`], 255 bytes: no request would ever be served.
    pub fn shared_scope(self, scope: impl AsRef<[u8]>) -> IdempotencyLayer<Scoped> {
        let scope: Arc<[u8]> = scope.as_ref().into();
        let (bytes, bytes_max) = (scope.len(), Key::SCOPE_BYTES_MAX);
        assert!(bytes <= bytes_max, "the shared scope has {bytes} bytes, more than {bytes_max}");
        self.scope(move |_| Some(Arc::clone(&scope)))
    }
}

impl<S> IdempotencyLayer<S> {
    /// The name of the header. Default `Idempotency-Key`.
    pub fn header(self, name: HeaderName) -> Self {
        self.with(|config| config.header = name)
    }

    /// Takes keys in quotes alone, as the IETF draft has them. By default bare ones are taken as well; both spellings
    /// of the same characters are the same key.
    pub fn quoted_keys_only(self) -> Self {
        self.with(|config| config.bare_keys = false)
    }

    /// Which methods are guarded. Requests of any other pass through, with or without a key. Default POST and PATCH,
    /// the two that are not idempotent by themselves.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|config| config.methods = methods.into_iter().collect())
    }

    /// Whether a guarded method needs a key. Default yes: 400 without one; otherwise such a request passes through, and
    /// its handler finds no [`Attempt`](crate::Attempt): one of axum's takes `Option<Extension<Attempt>>`.
    pub fn required(self, required: bool) -> Self {
        self.required_when(move |_| required)
    }

    /// As [`required`](Self::required), by the request: its route, its headers.
    pub fn required_when(self, required: impl Fn(&request::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|config| config.required = Arc::new(required))
    }

    /// Which address a request was sent to, where the one that the layer sees is only a part of it: its path and query
    /// make the fingerprint. A layer inside a router that axum nests in another has to say so, since axum takes the
    /// prefix away: otherwise `/accounts/1/charges` and `/accounts/2/charges` are the same request to it. Default, and
    /// where the function gives `None`, the URI of the request.
    ///
    /// ```
    /// use axum::extract::OriginalUri;
    /// use keyonce::http::IdempotencyLayer;
    ///
    /// # fn check(store: keyonce::Store) {
    /// let layer = IdempotencyLayer::new(store)
    ///     .uri(|request| request.extensions.get().map(|OriginalUri(whole)| whole.clone()));
    /// # let _ = layer;
    /// # }
    /// ```
    pub fn uri(self, uri: impl Fn(&request::Parts) -> Option<Uri> + Send + Sync + 'static) -> Self {
        self.with(|config| config.uri = Some(Arc::new(uri)))
    }

    /// What makes two requests the same. Default [`Recipe::new`].
    pub fn recipe(self, recipe: Recipe) -> Self {
        self.with(|config| config.recipe = recipe)
    }

    /// A recipe of an earlier release, under which keys that are still remembered were stored: a retry that matches by
    /// it is no mismatch. May be called several times.
    pub fn accept_also(self, earlier: Recipe) -> Self {
        self.with(|config| config.accept_also.push(earlier))
    }

    /// How large the body of a guarded request may be, in bytes; beyond it 413. It is held in memory. Default 1 MiB.
    pub fn request_bytes_max(self, bytes: usize) -> Self {
        self.with(|config| config.request_bytes_max = bytes)
    }

    /// How large a body is stored, in bytes. It is held in memory until it is; what is larger is passed on as it comes,
    /// done when it has come to its end, and a retry is told that the body was not kept. Default 256 KiB. The store has
    /// a limit of its own, [`Options::response_bytes_max`](crate::Options::response_bytes_max).
    pub fn response_bytes_max(self, bytes: usize) -> Self {
        self.with(|config| config.response_bytes_max = bytes)
    }

    /// Which answers are passed on as they come, however small, and not kept. Default those of the content types
    /// `text/event-stream` and `multipart/x-mixed-replace`.
    pub fn streams(self, streams: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|config| config.streams = Arc::new(streams))
    }

    /// How long a retry waits for the answer of the request that is running, before it is told 409. Default 0.
    pub fn wait(self, at_most: Duration) -> Self {
        self.with(|config| config.wait = at_most)
    }

    /// How long a request counts as running without a sign of life. While it runs that is renewed at every moment, so
    /// it is what `Retry-After` tells; and a client that takes no frame of a body for so long counts as gone. Default
    /// 30 s.
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|config| {
            config.lease = lease;
            config.with = config.with.clone().lease(lease);
        })
    }

    /// How long the lease of a running request is renewed. A request that hangs for longer no longer counts as running:
    /// its key is interrupted, and its answer still counts if it comes before anybody took over. A body that nobody
    /// listens to any more is dropped then. Default 1 h; above 0, to 100 years.
    pub fn run_at_most(self, at_most: Duration) -> Self {
        self.with(|config| {
            config.run_at_most = at_most;
            config.with = config.with.clone().renew_while_held(at_most);
        })
    }

    /// How long answers are remembered. Default the store's window, which is the longest.
    pub fn retention(self, retention: Duration) -> Self {
        self.with(|config| config.with = config.with.clone().retention(retention))
    }

    /// Which crash a key and its answer survive. Default the store's level.
    pub fn durability(self, durability: Durability) -> Self {
        self.with(|config| config.with = config.with.clone().durability(durability))
    }

    /// What an answer means for the key, by its head: status, header lines, extensions. Default [`Verdict::by_head`]. A
    /// [`Verdict`] in the extensions of the response goes before it.
    ///
    /// ```
    /// use keyonce::http::{IdempotencyLayer, Verdict};
    ///
    /// # fn check(store: keyonce::Store) {
    /// // For work that has no effect when it fails.
    /// let layer = IdempotencyLayer::new(store)
    ///     .verdict(|head| if head.status.is_server_error() { Verdict::Release } else { Verdict::by_head(head) });
    /// # let _ = layer;
    /// # }
    /// ```
    pub fn verdict(self, verdict: impl Fn(&response::Parts) -> Verdict + Send + Sync + 'static) -> Self {
        self.with(|config| config.verdict = Arc::new(verdict))
    }

    /// Runs a request again whose first run crashed or was dropped; for work that may safely be done twice, as when its
    /// receiver honours the downstream key. After a lapsed lease it is still 409, since that run may be at work.
    /// Default: 409.
    pub fn take_over(self) -> Self {
        self.with(|config| {
            config.when_interrupted = WhenInterrupted::TakeOver;
            config.with = config.with.clone().on_interrupted(OnInterrupted::TakeOver);
        })
    }

    /// Asks what became of a request that began and did not finish, by [`Key::downstream_key`], when it comes again.
    /// The function is told the key and what is known of it. Where its `cause` is a lapsed lease, the first run may
    /// still be at work.
    ///
    /// ```
    /// use keyonce::http::{Answer, Found, IdempotencyLayer};
    ///
    /// # async fn ask_the_bank(key: &str) -> Option<String> { let _ = key; None }
    /// # fn check(store: keyonce::Store) {
    /// let layer = IdempotencyLayer::new(store).reconcile(|key, _| async move {
    ///     match ask_the_bank(&key.downstream_key("charge")).await {
    ///         Some(receipt) => Found::Done(Answer::new(http::StatusCode::OK, receipt)),
    ///         None => Found::Unknown,
    ///     }
    /// });
    /// # let _ = layer;
    /// # }
    /// ```
    pub fn reconcile<F>(self, reconcile: impl Fn(Key, KeyInfo) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Found> + Send + 'static,
    {
        self.with(|config| {
            let reconcile = move |key, info| -> Finding { Box::pin(reconcile(key, info)) };
            config.when_interrupted = WhenInterrupted::Reconcile(Arc::new(reconcile));
            config.with = config.with.clone().on_interrupted(OnInterrupted::Surface);
        })
    }

    /// Which header lines are stored and replayed. Default all but cookies, credentials and the date.
    pub fn stored_headers(self, stored: StoredHeaders) -> Self {
        self.with(|config| config.stored_headers = stored)
    }

    /// Changes an answer before it is stored, to keep secrets off the disk. The first client gets what the service
    /// said. A `Content-Length` goes where the body has another one; what else tells of it, such as a digest, is for
    /// the function to change.
    pub fn clean(self, clean: impl Fn(&mut Answer) + Send + Sync + 'static) -> Self {
        self.with(|config| config.clean = Some(Arc::new(clean)))
    }

    /// Whether this request may still be shown the answer; the status that refuses it, if not. For services whose
    /// callers can lose their rights between two tries.
    pub fn may_replay(
        self,
        may: impl Fn(&request::Parts, &Key) -> Result<(), StatusCode> + Send + Sync + 'static,
    ) -> Self {
        self.with(|config| config.may_replay = Some(Arc::new(may)))
    }

    /// When the client made the request, as far as it says so, of the request and its key: a request from before the
    /// retention, of which nothing is known, is refused with 412 instead of run. See
    /// [`uuid_v7_time`](super::uuid_v7_time).
    pub fn issued_at(
        self,
        issued_at: impl Fn(&request::Parts, &[u8]) -> Option<SystemTime> + Send + Sync + 'static,
    ) -> Self {
        self.with(|config| config.issued_at = Some(Arc::new(issued_at)))
    }

    /// A header that tells the client until when the answer is remembered, such as `Idempotency-Expires`. Default none.
    pub fn expires_header(self, name: HeaderName) -> Self {
        self.with(|config| config.expires_header = Some(name))
    }

    /// Stripe's rules: POST alone; a key may be missing; the first status and body are final, 5xx as well
    /// ([`Verdict::by_status_as_stripe`]); replays carry `Idempotent-Replayed`; a mismatch is 400 of the type
    /// `idempotency_error`, and a request in flight 409 with the code `idempotency_key_in_use`. What is set after it
    /// goes before it.
    pub fn stripe(self) -> Self {
        self.methods([Method::POST]).required(false).with(|config| {
            config.verdict = Arc::new(|head| Verdict::by_status_as_stripe(head.status));
            config.marker = HeaderName::from_static("idempotent-replayed");
            config.dialect = Dialect::Stripe;
        })
    }

    /// The runs of all services that this layer and its clones make: to wait for them when the service shuts down.
    pub fn runs(&self) -> Runs {
        self.config.runs.clone()
    }

    fn with(mut self, set: impl FnOnce(&mut Config)) -> Self {
        set(&mut self.config);
        self
    }
}

impl<S> Layer<S> for IdempotencyLayer<Scoped> {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency::new(inner, self.config.clone(), self.scope.clone())
    }
}

impl Config {
    /// What is stored of an answer: the chosen lines, and the rest as it is cleaned.
    pub(super) fn stored(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        body: Bytes,
        trailers: Option<&HeaderMap>,
    ) -> Answer {
        let stored_headers = &self.stored_headers;
        let (headers, trailers) = (stored_headers.of(headers), trailers.map(|trailers| stored_headers.of(trailers)));
        let mut stored = Answer { status, headers, body, trailers };
        if let Some(clean) = &self.clean {
            let bytes = stored.body.len();
            clean(&mut stored);
            // The length that the first client was told is not that of what is left.
            if stored.body.len() != bytes && stored.headers.contains_key(CONTENT_LENGTH) {
                stored.headers = without(&stored.headers, &[CONTENT_LENGTH]);
            }
        }
        stored
    }
}

impl<S> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("header", &self.config.header).finish_non_exhaustive()
    }
}

fn is_endless(parts: &response::Parts) -> bool {
    let said = media_type(&parts.headers);
    ["text/event-stream", "multipart/x-mixed-replace"].iter().any(|endless| said.eq_ignore_ascii_case(endless))
}
