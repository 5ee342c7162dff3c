"""The explorer's server: routes over the panels, on loopback only."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from paceline import __version__
from paceline.errors import PacelineError, RunError
from paceline.report import plan_sections
from paceline.web import panels
from paceline.web.downloads import download
from paceline.web.guard import Guard
from paceline.web.scenario import LONGEST, MOST_EDITS, Scenario, Sources, catalog, sizes_text
from paceline.web.search import Searches
from paceline.web.workers import Workers

_STATIC = Path(str(files("paceline.web") / "static"))
_ANSWERS = Path(str(files("paceline.report") / "style.css"))
Text = Annotated[str, Field(max_length=LONGEST)]
PanelName = Literal[
    "headline", "time", "memory", "timeline", "scaling", "bottlenecks", "roofline", "ways", "trust"
]
FileKind = Literal[
    "json",
    "plan",
    "trace",
    "report",
    "torchrun",
    "fsdp2",
    "megatron",
    "deepspeed",
    "accelerate",
    "torchtitan",
    "slurm",
]
Key = Annotated[str, PathParameter(pattern="^[0-9a-f]{16}$")]
Width = Annotated[float, Field(ge=panels.NARROWEST, le=panels.WIDEST)]


class ScenarioIn(BaseModel):
    """A scenario as the page sends it."""

    model_config = ConfigDict(extra="forbid")
    model: Text
    cluster: Text
    plan: Text = ""
    edits: Annotated[list[Text], Field(max_length=MOST_EDITS)] = []
    budget: Text = ""

    def read(self) -> Scenario:
        """The value that the library takes."""
        return Scenario(**{**self.model_dump(), "edits": tuple(self.edits)})


class MovedControl(BaseModel):
    """A control that was moved."""

    path: Text
    value: Text


class ViewIn(BaseModel):
    """A scenario, the controls moved since it was last answered, and the panels to draw."""

    scenario: ScenarioIn
    changes: Annotated[list[MovedControl], Field(max_length=MOST_EDITS)] = []
    width: Width = 560.0
    panels: Annotated[list[PanelName], Field(max_length=20)] = []


class PanelIn(BaseModel):
    """A scenario and how a panel is drawn; `draft` while a slider moves."""

    scenario: ScenarioIn
    width: Width = 560.0
    draft: bool = False
    log: bool = False
    start: Annotated[float, Field(ge=0, le=1)] = 0.0
    end: Annotated[float, Field(ge=0, le=1)] = 1.0


class KeptIn(BaseModel):
    """A scenario that was kept, with its name."""

    name: Annotated[str, Field(max_length=80)]
    scenario: ScenarioIn


class CompareIn(BaseModel):
    """Up to four scenarios."""

    kept: Annotated[list[KeptIn], Field(min_length=1, max_length=4)]
    width: Width = 560.0


class SearchIn(BaseModel):
    """What to find the best plan for."""

    scenario: ScenarioIn
    objective: Literal["time", "cost", "energy"] = "time"


class Problem(BaseModel):
    """What is wrong with a request, and what could be taken in its place."""

    message: str
    offers: list[dict[str, str]] = []


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """What one run of the server has: where models come from, its workers, and the scenario it opens with."""

    sources: Sources
    workers: Workers
    searches: Searches
    first: Scenario


_WRONG: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in (400, 401, 403, 413, 422)}


def application(explorer: Explorer) -> FastAPI:
    """The application without its guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        explorer.searches.close()
        explorer.workers.close()

    app = FastAPI(
        title="Paceline explorer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_WRONG,
    )
    app.state.explorer = explorer
    app.add_exception_handler(PacelineError, _mistake)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)
    app.get("/static/answers.css", include_in_schema=False)(_answers)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    app.get("/", include_in_schema=False)(_page)
    app.get("/api/catalog")(_catalog)
    app.post("/api/view")(_view)
    app.post("/api/panel/{name}")(_panel)
    app.post("/api/predict")(_predict)
    app.post("/api/upload")(_upload)
    app.post("/api/compare")(_compare)
    app.post("/api/download/{kind}", response_class=Response)(_download)
    app.post("/api/search")(_search)
    app.get("/api/search/{key}")(_progress)
    app.post("/api/search/{key}/result")(_result)
    app.delete("/api/search/{key}")(_stop)
    return app


async def _page() -> Response:
    return FileResponse(_STATIC / "index.html")


async def _answers() -> Response:
    return FileResponse(_ANSWERS)


async def _mistake(_: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return JSONResponse(panels.problem(error), 422)


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"message": f"{place}: {first['msg']}", "offers": []}, 422)


async def _catalog(request: Request) -> dict[str, Any]:
    """Names to choose from, and the scenario that the page opens with."""
    explorer: Explorer = request.app.state.explorer
    first = explorer.first
    names = catalog()
    return {**names, "first": {"scenario": first, "link": first.link()}, "version": __version__}


async def _view(request: Request, asked: ViewIn) -> dict[str, Any]:
    """A scenario with its changes made: controls and panels."""
    explorer: Explorer = request.app.state.explorer
    changes = [(change.path, change.value) for change in asked.changes]
    found: dict[str, Any] = await explorer.workers.run(
        "quick", panels.view, asked.scenario.read(), changes, asked.width, asked.panels, explorer.sources
    )
    return found


async def _panel(request: Request, name: PanelName, asked: PanelIn) -> dict[str, Any]:
    """One panel of a scenario."""
    explorer: Explorer = request.app.state.explorer
    found: dict[str, Any] = await explorer.workers.run(
        "slow",
        panels.panel,
        asked.scenario.read(),
        name,
        explorer.sources,
        asked.model_dump(exclude={"scenario"}),
    )
    return found


async def _predict(request: Request, scenario: ScenarioIn) -> dict[str, Any]:
    """The prediction, as `paceline predict --json` prints it."""
    explorer: Explorer = request.app.state.explorer
    found: dict[str, Any] = await explorer.workers.run(
        "quick", panels.predict, scenario.read(), explorer.sources
    )
    return found


async def _upload(request: Request, content: Annotated[dict[str, Any], Body()]) -> dict[str, str]:
    """A model from a Hugging Face configuration (config.json), or from a saved workload."""
    explorer: Explorer = request.app.state.explorer
    return {"model": await explorer.workers.run("slow", uploaded, content, explorer.sources.uploads)}


async def _compare(request: Request, asked: CompareIn) -> dict[str, Any]:
    """Scenarios side by side."""
    explorer: Explorer = request.app.state.explorer
    kept = [(one.name, one.scenario.read()) for one in asked.kept]
    found: dict[str, Any] = await explorer.workers.run(
        "slow", panels.side_by_side, kept, asked.width, explorer.sources
    )
    return found


async def _download(request: Request, kind: FileKind, scenario: ScenarioIn) -> Response:
    """A file of a scenario."""
    explorer: Explorer = request.app.state.explorer
    name, type_, content = await explorer.workers.run(
        "slow", download, kind, scenario.read(), explorer.sources
    )
    return Response(
        content, media_type=type_, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


async def _search(request: Request, asked: SearchIn) -> dict[str, Any]:
    """Starts a search for the best plan."""
    explorer: Explorer = request.app.state.explorer
    scenario = asked.scenario.read()
    explorer.sources.check(scenario)
    return explorer.searches.start(scenario, asked.objective).status()


async def _progress(request: Request, key: Key) -> dict[str, Any]:
    """How far a search is."""
    explorer: Explorer = request.app.state.explorer
    return explorer.searches.get(key).status()


async def _stop(request: Request, key: Key) -> dict[str, Any]:
    """Stops a search: it answers with the best so far."""
    explorer: Explorer = request.app.state.explorer
    return explorer.searches.stop(key).status()


async def _result(request: Request, key: Key, width: Width = 560.0) -> dict[str, Any]:
    """What a search found: the best plans, and the certificate."""
    explorer: Explorer = request.app.state.explorer
    planned = explorer.searches.get(key).planned
    if planned is None:
        raise RunError("this search has no plan yet")
    return {"html": plan_sections.planned(planned, width), "plan": str(planned.best.plan)}


def uploaded(content: dict[str, Any], folder: Path) -> str:
    """The model text of an uploaded file: the sizes of a configuration; a workload is kept for this run."""
    from paceline.catalog import hugging_face
    from paceline.spec.transformer import from_hf
    from paceline.spec.workload import Workload

    if "model_type" in content:
        return sizes_text(from_hf(content, hugging_face.name(content)))
    text = json.dumps(content)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    try:
        Workload.load(path)
    except PacelineError:
        path.unlink()
        raise
    return f"upload:{name}"


def serve(first: Scenario, given: frozenset[str], *, port: int = 0, opened: Any = None) -> None:
    """Runs the server until it is interrupted; `opened` is called with the address once it answers."""
    listener = socket.create_server(("127.0.0.1", port))
    token, port = secrets.token_urlsafe(24), listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="paceline-explore-") as folder:
        workers = Workers()
        workers.warm()
        sources = Sources(uploads=Path(folder), given=given)
        explorer = Explorer(sources=sources, workers=workers, searches=Searches(sources), first=first)
        guarded = Guard(application(explorer), token=token, port=port)
        config = uvicorn.Config(
            guarded, log_level="warning", server_header=False, timeout_graceful_shutdown=2
        )
        if opened is not None:
            opened(f"http://127.0.0.1:{port}/?token={token}")
        uvicorn.Server(config).run(sockets=[listener])
