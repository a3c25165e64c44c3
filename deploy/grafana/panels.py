"""What the dashboards are made of: kinds of panels over Grafana's own builders, rows, and a whole dashboard as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DataTransformerConfig, DynamicConfigValue, Threshold
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from geomesh_p2p.core.observations import PHASES as ACTIVITIES

SOURCE = DataSourceRef("prometheus", "prometheus")
SCHEMA_VERSION = 40                       # of Grafana 11.4
GOOD, WARN, BAD, PLAIN = "green", "orange", "red", "text"

PHASES = ("compute", "data_wait", "codec", "straggler_idle", "wan_idle", "control")
COLORS = dict(zip(PHASES, ("green", "yellow", "blue", "red", "purple", "orange"), strict=True))



@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "{{site}}"


@dataclass(frozen=True)
class Panel:
    """`limits` are (from this value on, colour), the first of them below all values."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 12
    height: int = 8
    limits: tuple[tuple[float | None, str], ...] = ()
    decimals: int | None = None
    least: float | None = None
    most: float | None = None

    def common(self, builder: Any) -> Any:
        builder.title(self.title).description(self.about).datasource(SOURCE).unit(self.unit).span(self.width).height(self.height)
        # Without any, Grafana takes its own: red from 80 on.
        steps = [Threshold(value, color) for value, color in self.limits or ((None, PLAIN),)]
        builder.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        for value, set_it in ((self.decimals, builder.decimals), (self.least, builder.min), (self.most, builder.max)):
            if value is not None:
                set_it(value)
        return builder

    def targets(self, builder: Any, instant: bool, tabular: bool = False) -> Any:
        for letter, query in zip("ABCDEFGHIJ", self.queries, strict=False):
            target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).datasource(SOURCE)
            target = target.instant() if instant else target.range()
            builder.with_target(target.format(PromQueryFormat.TABLE if tabular else PromQueryFormat.TIME_SERIES))
        return builder


@dataclass(frozen=True)
class Number(Panel):
    """One figure, the newest."""

    width: int = 4
    height: int = 4
    texts: tuple[tuple[str, str, str], ...] = ()  # (value, what to show for it, colour)
    graph: bool = False

    def build(self) -> Any:
        builder = self.targets(self.common(stat.Panel()), instant=not self.graph)
        builder.graph_mode(common_models.BigValueGraphMode.AREA if self.graph else common_models.BigValueGraphMode.NONE)
        builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        builder.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        if self.texts:
            results = {value: models.ValueMappingResult(text=text, color=color) for value, text, color in self.texts}
            builder.mappings([models.ValueMap(results)])
        return builder


@dataclass(frozen=True)
class Lines(Panel):
    stacked: bool = False
    logarithmic: bool = False

    def build(self) -> Any:
        builder = self.targets(self.common(timeseries.Panel()), instant=False)
        builder.legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.RIGHT)
            .calcs(["lastNotNull"])
            .show_legend(True)
        )
        builder.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        builder.line_width(1).span_nulls(True)
        if self.stacked:
            builder.fill_opacity(70).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
            for phase, color in COLORS.items():
                fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})
                builder.override_by_name(phase, [fixed])
        if self.logarithmic:
            builder.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(2))
        if self.limits:
            builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
        return builder


@dataclass(frozen=True)
class Bars(Panel):
    def build(self) -> Any:
        builder = self.targets(self.common(bargauge.Panel()), instant=True)
        return builder.orientation(common_models.VizOrientation.HORIZONTAL).show_unfilled(True)


@dataclass(frozen=True)
class Matrix(Panel):
    """From `site` (rows) to `remote` (columns)."""

    def build(self) -> Any:
        builder = self.targets(self.common(table.Panel()), instant=True, tabular=True)
        pivot = {"rowField": "site", "columnField": "remote", "valueField": "Value", "emptyValue": "empty"}
        builder.with_transformation(DataTransformerConfig("groupingToMatrix", options=pivot))
        cells = DynamicConfigValue("custom.cellOptions", {"type": "color-background", "mode": "gradient"})
        return builder.override_by_regexp("^(?!site).*$", [cells]) if self.limits else builder


@dataclass(frozen=True)
class Table(Panel):
    """One row a site, one column a query; a column's unit is its legend's, written as "name|unit"."""

    width: int = 24

    def build(self) -> Any:
        columns = [query.legend.partition("|") for query in self.queries]
        builder = self.targets(self.common(table.Panel()), instant=True, tabular=True)
        builder.with_transformation(DataTransformerConfig("joinByField", options={"byField": "site", "mode": "outer"}))
        wanted = ["site", *(f"Value #{letter}" for letter, _ in zip("ABCDEFGHIJ", columns, strict=False))]
        named = {f"Value #{letter}": name for letter, (name, _, _) in zip("ABCDEFGHIJ", columns, strict=False)}
        builder.with_transformation(DataTransformerConfig("filterFieldsByName", options={"include": {"names": wanted}}))
        builder.with_transformation(DataTransformerConfig("organize", options={"renameByName": named}))
        for name, _, unit in columns:
            if unit:
                builder.override_by_name(name, [DynamicConfigValue("unit", unit)])
        return builder


@dataclass(frozen=True)
class Phases(Panel):
    """What each site does, over time: queries give 1 + the phase's place in ACTIVITIES."""

    width: int = 24

    def build(self) -> Any:
        builder = self.targets(self.common(statetimeline.Panel()), instant=False)
        colors = {"training": "green", "exchange": "purple", "straggler_idle": "red", "catch_up": "yellow", "planning": "blue"}
        results = {
            str(place): models.ValueMappingResult(text=name.replace("_", " "), color=colors.get(name, "gray"))
            for place, name in enumerate(ACTIVITIES, 1)
        }
        return builder.mappings([models.ValueMap(results)]).show_value(common_models.VisibilityMode.NEVER).merge_values(True)


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Any, ...]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    one_site: bool = False

    def build(self) -> str:
        board = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.about)
            .tags(["geomesh"])
            .readonly()
            .refresh("10s")
            .time("now-1h", "now")
            .timezone("browser")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .variables(variables(self.one_site))
            .link(
                dashboard.DashboardLink("GeoMesh")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["geomesh"])
                .as_dropdown(False)
                .include_vars(True)
                .keep_time(True)
            )
        )
        number = 0
        for row in self.rows:
            board.with_row(dashboard.Row(row.title))
            for panel in row.panels:
                number += 1
                board.with_panel(panel.build().id(number))
        built = json.loads(json.dumps(board.build(), cls=JSONEncoder))
        built["schemaVersion"] = SCHEMA_VERSION
        return json.dumps(built, indent=1, sort_keys=True) + "\n"


def variables(one_site: bool) -> Sequence[Any]:
    site = (
        dashboard.QueryVariable("site")
        .label("Site")
        .description("Which sites the panels show")
        .datasource(SOURCE)
        .query({"query": "label_values(geomesh_is_leader, site)", "refId": "site"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    if not one_site:
        everything = models.VariableOption(text="All", value="$__all")
        site = site.multi(True).include_all(True).current(everything)
    window = (
        dashboard.CustomVariable("window")
        .label("Average over")
        .description("How long rates and shares are averaged: choose at least two rounds")
        .values("1m,5m,15m,1h,6h")
        .current(models.VariableOption(text="5m", value="5m"))
    )
    return [site, window]
